"""The loop beside a server: it notices drift, trains a draft, tries it and puts it in service.

It has a thread of its own, and asks the engine's thread for what concerns steps. Every stage is a
method that returns the record of its end; the journal decides which comes next.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from forerun.atomic_write import atomic_folder
from forerun.drafters.base import FAILURES, Drafter
from forerun.engine.engine import Engine
from forerun.engine.loading import check_draft, load_drafter
from forerun.engine.shadow import ShadowDraft
from forerun.engine.thread import EngineThread
from forerun.errors import EngineStopped, ForerunError
from forerun.loop.config import LoopConfig
from forerun.loop.gain import Gain, measure_gain
from forerun.loop.journal import Journal, Record, Stage, find_draft, find_next, find_previous
from forerun.loop.store import TrafficStore
from forerun.loop.train import align_command, run_training
from forerun.models.checkpoint import ModelFiles
from forerun.models.draft_card import staleness
from forerun.server.metrics import StepTotals

logger = logging.getLogger("forerun.loop")

POLL_S = 0.5
SETTLE_LOOKS = 5
"""How often the former draft is compared after a promotion."""
SETTLE_CONFIDENCE = 0.99
"""Of each of these looks."""


class LoopStopped(Exception):
    """The loop is to end; the stage that is interrupted begins again with the next start."""


class UnusableDraft(Exception):
    """A draft that cannot be loaded beside the engine, and why."""


class Loop:
    """Runs the stages beside an engine until it is closed.

    Args:
        target: name or folder, as the server was started with.
        draft: likewise, version 0.
        dtype: of drafts, likewise.
        totals: of the server, which notice falls of acceptance.
    """

    def __init__(  # noqa: PLR0913 (each is a part of the server)
        self,
        config: LoopConfig,
        journal: Journal,
        store: TrafficStore,
        running: EngineThread,
        *,
        target: str,
        draft: str,
        dtype: str,
        totals: StepTotals,
    ) -> None:
        self.config, self.journal, self.store, self.running = config, journal, store, running
        self.target, self.draft, self.totals = target, draft, totals
        self.dtype = dtype
        self._candidate: Drafter | None = None
        self._version = journal.version
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forerun-loop")

    def __enter__(self) -> Loop:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """End the present stage unfinished."""
        self._stop.set()
        self._thread.join()

    def find_source(self, version: int) -> str:
        """Return the name or folder of a draft."""
        return find_draft(self.journal.records, version) or self.draft

    def _run(self) -> None:
        try:
            self._wait_for(lambda: self.running.is_running)
            while True:
                self.take_stage()
        except (LoopStopped, EngineStopped):
            return
        except Exception:
            logger.exception("the loop ended by an error; serving goes on without it")

    def take_stage(self) -> Record:
        """Take the next stage, write its record, and draw the consequence."""
        number, stage = find_next(self.journal.records)
        stages: dict[Stage, Callable[[int], Record]] = {
            "watch": self.watch,
            "train": self.train,
            "shadow": self.try_candidate,
            "promote": self.promote,
            "settle": self.settle,
            "roll_back": self.roll_back,
        }
        record = stages[stage](number)
        self.journal.append(record)
        logger.info("round %d, %s: %s", record.round, record.stage, record.why)
        if record.version != self._version:
            self._put_in_service(record.version)
        return record

    # --------------------------------------------------------------------------------------- stages

    def watch(self, number: int) -> Record:
        """Wait until acceptance has fallen; a target that has changed is noticed at once."""
        why, seen = self._find_staleness(), sum(self.totals.num_changes.values())
        while why is None:
            self._pause()
            if sum(self.totals.num_changes.values()) > seen:
                why = self.totals.changes[-1].words
        return self._record(number, "watch", why)

    def train(self, number: int) -> Record:
        """Align the draft in service on the newest texts, once there are enough."""
        begun_s, first = self.journal.records[-1].at_s, self.store.num_stored
        folder = self.config.folder / f"round-{number:04d}"
        texts, out = folder / "texts", folder / "align"
        if not texts.exists():
            self._wait_for(  # also if the clock was set back
                lambda: (
                    max(self.store.count(begun_s), self.store.num_stored - first)
                    >= self.config.min_texts
                )
            )
            try:
                self._write_texts(texts)
            except (ForerunError, OSError) as error:
                why = f"no texts could be written for a training: {error}"
                return self._record(number, "train", why, is_good=False)
        drafter, source = self.running.engine.drafter, self.find_source(self._version)
        assert drafter is not None
        command = align_command(self.target, source, drafter.method, texts, out, self.config.train)
        limit_s = 60.0 * self.config.train_minutes
        failure = run_training(command, folder / "train.log", limit_s, self._stop.is_set)
        self._check_going()
        if failure is not None:
            return self._record(number, "train", f"no draft was trained: {failure}", is_good=False)
        draft = str(out / "draft")
        return self._record(number, "train", f"{draft} was aligned from {source}", draft=draft)

    def try_candidate(self, number: int) -> Record:
        """Try the trained draft on live requests; it is good if the whole interval is above 0."""
        try:
            candidate = self._load(self.find_source(number))
        except UnusableDraft as error:
            return self._record(number, "shadow", f"it is refused: {error}", is_good=False)
        with self._try_drafter(candidate) as shadow:
            gain = None
            if self._await_requests(shadow, self.config.shadow_requests):
                gain = self._read_gain(shadow)
        if gain is None:
            why = shadow.failure or "too few requests drafted to say whether it is faster"
            return self._record(number, "shadow", f"it is refused: {why}", is_good=False)
        is_good = gain.gain.is_above(0.0)
        why = f"{'it is faster' if is_good else 'it is not shown to be faster'}: {gain.words}"
        self._candidate = candidate if is_good else None
        return self._record(number, "shadow", why, is_good=is_good, gain=gain)

    def promote(self, number: int) -> Record:
        """Say that the tried draft is in service from here on."""
        try:
            self._candidate = self._candidate or self._load(self.find_source(number))
        except UnusableDraft as error:  # since it was tried
            return self._record(number, "promote", f"it is gone: {error}", is_good=False)
        why = f"version {number} takes the place of version {self._version}"
        return self._record(number, "promote", why, version=number)

    def settle(self, number: int) -> Record:
        """Try the former draft beside the promoted one, which is bad if the former is faster."""
        before = find_previous(self.journal.records)
        gain, is_good, num = None, True, self.config.settle_requests
        try:
            former = self._candidate or self._load(self.find_source(before))
        except UnusableDraft as error:
            return self._record(number, "settle", f"version {before} is gone: {error}")
        with self._try_drafter(former) as shadow:
            self._candidate = shadow.drafter
            for look in range(1, SETTLE_LOOKS + 1):
                if not self._await_requests(shadow, num * look // SETTLE_LOOKS):
                    break  # there is nothing to go back to
                gain = self._read_gain(shadow, SETTLE_CONFIDENCE)
                is_good = gain is None or not gain.gain.is_above(0.0)
                if not is_good:
                    break
        self._candidate = None if is_good else self._candidate
        words = shadow.failure or ("it was not measured" if gain is None else gain.words)
        why = f"version {before} beside version {number}: {words}"
        return self._record(number, "settle", why, is_good=is_good, gain=gain)

    def roll_back(self, number: int) -> Record:
        """Say that the draft before the promotion is in service again."""
        before = find_previous(self.journal.records)
        try:
            self._candidate = self._candidate or self._load(self.find_source(before))
        except UnusableDraft as error:
            why = f"version {before}, which is faster, is gone: {error}"
            return self._record(number, "roll_back", why, is_good=False)
        why = f"version {before} is faster than version {number} on live requests, and is back"
        return self._record(number, "roll_back", why, version=before)

    # ---------------------------------------------------------------------------------------- parts

    def _record(
        self, number: int, stage: Stage, why: str, gain: Gain | None = None, **fields: Any
    ) -> Record:
        figures = {} if gain is None else gain.figures
        given = {"is_good": True, "version": self._version, **fields}
        return Record(round=number, stage=stage, why=why, figures=figures, **given)

    def _find_staleness(self) -> str | None:
        """Return how the target differs from that of the draft in service, once for each draft."""
        version = self._version
        seen = any(r.stage == "watch" and r.version == version for r in self.journal.records)
        if seen:
            return None
        try:
            return staleness(
                ModelFiles.find(self.find_source(version)).folder, ModelFiles.open(self.target)
            )
        except ForerunError as error:
            logger.info("the draft's card is of no use: %s", error)
            return None

    def _write_texts(self, texts: Path) -> None:
        """Write the texts of a training, at once, so that an interrupted one goes on with them."""
        old = self.config.old_texts
        with atomic_folder(texts) as scratch:
            self.store.export(scratch / "collected.parquet", self.config.max_texts)
            if old is not None and old.is_dir():
                shutil.copytree(old, scratch / "old")
            elif old is not None:
                shutil.copyfile(old, scratch / f"old{old.suffix}")

    def _load(self, source: str) -> Drafter:
        """Load a draft beside the one in service; raises UnusableDraft."""
        engine = self.running.engine
        try:
            files = check_draft(source, self.target)
            drafter = load_drafter(
                files, engine.target, engine.tokenizer, dtype=self.dtype, config=engine.config
            )
            self.running.call(lambda engine: engine.check_drafter(drafter))
        except EngineStopped:
            raise
        except FAILURES as error:
            raise UnusableDraft(str(error)) from error
        return drafter

    @contextmanager
    def _try_drafter(self, drafter: Drafter) -> Iterator[ShadowDraft]:
        """Try a drafter on the engine's requests while the block runs."""

        def begin(engine: Engine) -> ShadowDraft:
            shadow = ShadowDraft(
                drafter,
                engine.target.vocab_size,
                engine.config.num_speculative_tokens,
                self.config.shadow_share,
            )
            engine.observers.append(shadow)
            return shadow

        def end(engine: Engine) -> None:
            if shadow in engine.observers:
                engine.observers.remove(shadow)
            shadow.close()

        shadow = self.running.call(begin)
        try:
            yield shadow
        finally:
            with suppress(EngineStopped):
                self.running.call(end)

    def _await_requests(self, shadow: ShadowDraft, num_requests: int) -> bool:
        """Wait until so many requests were scored; False where the draft fails."""
        self._wait_for(lambda: shadow.failure is not None or shadow.num_ended >= num_requests)
        return shadow.failure is None

    def _read_gain(self, shadow: ShadowDraft, confidence: float = 0.95) -> Gain | None:
        ended = self.running.call(
            lambda engine: [tally for tally in shadow.tallies.values() if tally.has_ended]
        )
        return measure_gain(ended, confidence)

    def _put_in_service(self, version: int) -> None:
        """Swap the draft in service between two steps, and keep the one before for a trial."""
        drafter = self._candidate or self._load(self.find_source(version))

        def swap(engine: Engine) -> Drafter | None:
            former = engine.drafter
            engine.use_drafter(drafter)
            return former

        self._candidate = self.running.call(swap)
        self._version = version

    def _wait_for(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self._pause()

    def _pause(self) -> None:
        if self._stop.wait(POLL_S):
            raise LoopStopped
        self._check_going()

    def _check_going(self) -> None:
        if self._stop.is_set() or self.running.failure is not None:
            raise LoopStopped
