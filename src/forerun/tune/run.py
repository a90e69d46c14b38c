"""Runs a comparison of servers: measures in turns, confirms the fastest setting, audits it."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean

import msgspec

from forerun import __version__
from forerun.client.connection import ClientConfig
from forerun.errors import InvalidRequest, ServerUnavailable
from forerun.provenance import collect
from forerun.sampling.config import SamplingParams
from forerun.theory.intervals import Interval
from forerun.tune.arms import Arm, Load, hide_keys
from forerun.tune.check import ExactnessCheck, check_text, check_tokens
from forerun.tune.config import TuneConfig
from forerun.tune.drafting import find_drafting, sum_drafting
from forerun.tune.fleet import Fleet, Notify
from forerun.tune.load import (
    LoadBlock,
    PromptDeck,
    compare_texts,
    compute_figures,
    count_requests,
    list_prompts,
    measure_load,
)
from forerun.tune.process import ServerFailed
from forerun.tune.race import LEAST_BLOCKS, Race, estimate_speedup, pays
from forerun.tune.report import ArmResult, LoadResult, TuneReport
from forerun.tune.server import MeasuredServer
from forerun.tune.state import AuditRecord, BlockRecord, GivenUpRecord, PromptsRecord, RunState

RACE_SHARE = 0.7
"""Share of the minutes for choosing; the rest confirms and audits what was chosen."""
CONFIRM_BLOCKS = 8
"""Blocks of the chosen arm and of the baseline on prompts that had no part in the choice."""
LEAST_READY_S = 10.0
"""Seconds that a server has to start even if no more are left."""
WARM_UP_TOKENS = 16
BLOCKS_PER_START = 3
"""Blocks of an arm before the next one starts, where servers run one at a time."""


def describe_prompts(path: Path | None) -> str:
    """Return a path with a digest of what it holds, if it is a file."""
    if path is None or not path.is_file():
        return str(path or "shipped")
    return f"{path} ({hashlib.sha256(path.read_bytes()).hexdigest()[:12]})"


def describe_settings(arms: Sequence[Arm], config: TuneConfig, source: str) -> dict[str, str]:
    """Return what an interrupted run must share with the one that goes on, as text by name."""
    return {
        "command": hide_keys(source),
        "arms": "; ".join(f"{arm.name}: {hide_keys(arm.typed)}" for arm in arms),
        "loads": "; ".join(load.label for load in config.loads),
        "max_tokens": str(config.max_tokens),
        "acceptance_length": str(config.acceptance_length),
        "prompts": describe_prompts(config.prompts),
    }


class Tuner:
    """One run over the arms of one server.

    Args:
        arms: "none" among them is the baseline; without it the first one is.
        source: what was tuned, as the user wrote it.
        folder: for the state of the run and the logs of the servers; a run on the same folder
            goes on where another was interrupted.
        notify: receives what is being done.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        config: TuneConfig,
        *,
        source: str,
        folder: Path,
        notify: Notify,
    ) -> None:
        self.arms = {arm.name: arm for arm in arms}
        self.config, self.source, self.folder = config, hide_keys(source), folder
        self.notify = notify
        self.state = RunState(folder, describe_settings(arms, config, source))
        self.race = Race(list(self.arms), config.loads)
        self.fleet = Fleet(
            arms,
            folder / "logs",
            one_at_a_time=config.one_at_a_time,
            ready_s=config.ready_s,
            on_start=self._warm_up,
            notify=notify,
        )
        self.versions = {"forerun": __version__}
        list_prompts(config.prompts, is_chat=True)  # refused before a server is started
        if config.audit_tokens:
            check_tokens(config.audit_tokens)
        self._deck: PromptDeck | None = None
        self._blocks: dict[tuple[str, Load, bool], list[LoadBlock]] = {}
        self._checks: dict[str, ExactnessCheck] = {}
        self._confirmed: dict[Load, Interval] = {}
        self._recommended: dict[Load, str] = {}
        self._started_s = time.monotonic()

    @property
    def minutes(self) -> float:
        """Minutes since the run began."""
        return (time.monotonic() - self._started_s) / 60.0

    @property
    def has_blocks(self) -> bool:
        """Whether anything was measured, by this run or by the one that it goes on with."""
        return bool(self._blocks)

    def run(self) -> TuneReport:
        """Measure until every load is decided or the time is over, and confirm what won.

        Raises:
            ServerFailed: the baseline cannot be started or measured.
        """
        with self.state, self.fleet:
            self._restore()
            self._choose()
            while self.config.acceptance_length is None and (pending := self._list_undecided()):
                self._confirm(pending[0])
        return self.report()

    def report(self) -> TuneReport:
        """Return what is known until now."""
        return TuneReport(
            source=self.source,
            baseline=self.race.baseline,
            arms=tuple(self.arms.values()),
            loads=tuple(map(self._summarise, self.config.loads)),
            memory_bytes=self.fleet.memory_bytes,
            start_s=self.fleet.start_s,
            minutes=self.minutes,
            is_complete=len(self._recommended) == len(self.config.loads),
            acceptance_length=self.config.acceptance_length,
            provenance=collect({}).to_dict(),
            versions=self.versions,
        )

    def _list_undecided(self) -> list[Load]:
        return [load for load in self.config.loads if load not in self._recommended]

    def _restore(self) -> None:
        """Take over what an interrupted run measured and decided."""
        for record in self.state.records:
            if isinstance(record, BlockRecord):
                block = record.block
                is_known = block.arm in self.arms and block.load in self.config.loads
                if not (is_known and block.num_tokens > 0 and block.wall_s > 0.0):
                    raise InvalidRequest(
                        f"--out {self.folder} has a damaged state.jsonl (a block of "
                        f"{block.arm!r:.100}); name another folder"
                    )
                self._add(block, record.is_final)
            elif isinstance(record, AuditRecord):
                self._checks[record.arm] = msgspec.convert(record.report, ExactnessCheck)
            elif isinstance(record, PromptsRecord):
                self._make_deck(record)
            else:
                self.race.give_up(record.arm, record.reason, record.load)

    # ------------------------------------------------------------------------------- measuring

    def _choose(self) -> None:
        """Play rounds until every load is decided or its share of the time is over."""
        self.race.finish_round(self._find_seconds_left())  # of what an interrupted run measured
        while planned := self.race.plan_round():
            for name, group in groupby(planned, key=lambda block: block[0]):
                if self._find_seconds_left() <= 0.0 and self._blocks:
                    self.race.end()
                    return
                self._measure(name, [(load, index) for _, load, index in group])
            if self.fleet.one_at_a_time and self.race.blocks_per_round == 1:
                self.race.blocks_per_round = BLOCKS_PER_START
            start_s = max(self.fleet.start_s.values(), default=0.0)
            arm_s = start_s if self.fleet.one_at_a_time else 0.0
            for one in self.race.finish_round(self._find_seconds_left(), arm_s):
                self.notify(f"{one.load.label}: {one.arm} given up: {one.reason}")

    def _find_seconds_left(self) -> float:
        """Return the seconds that are left to choose."""
        return 60.0 * (RACE_SHARE * self.config.minutes - self.minutes)

    def _measure(
        self, name: str, blocks: Sequence[tuple[Load, int]], is_final: bool = False
    ) -> bool:
        """Measure blocks of one arm; returns whether its server answered them all.

        Raises:
            ServerFailed: it is the baseline, without which nothing can be compared.
        """
        params = SamplingParams(max_tokens=self.config.max_tokens)
        if name != self.race.baseline:
            seconds_left = 60.0 * (self.config.minutes - self.minutes)
            self.fleet.ready_s = min(self.config.ready_s, max(LEAST_READY_S, seconds_left))
        try:
            with self.fleet.use(name), self._connect(self.arms[name]) as server:
                if name == self.race.baseline and (version := server.read_version()):
                    self.versions["server"] = version
                for load, index in blocks:
                    what = "confirming" if is_final else "measuring"
                    self.notify(f"{load.label}: {what} {name}, block {index + 1}")
                    deck, number = self._find_deck(server), count_requests(load)
                    prompts = deck.deal(load, index, number, is_final=is_final)
                    before = server.read_metrics()
                    block = measure_load(server, prompts, params, arm=name, load=load, index=index)
                    drafting = find_drafting(block.answers, before, server.read_metrics())
                    block = replace(block, drafting=drafting)
                    self._add(block, is_final)
                    self.state.append(BlockRecord(block=block, is_final=is_final))
                    self._check_drafts(block)
        except (InvalidRequest, ServerUnavailable) as error:
            reason = self.fleet.find_failure(name) or str(error)
            self.fleet.stop(name)
            if name == self.race.baseline:
                raise ServerFailed(
                    f"{name}, which the others are compared with: {reason}"
                ) from error
            self._give_up(name, reason)
            return False
        return True

    def _check_drafts(self, block: LoadBlock) -> None:
        """Raise ServerFailed where a draft model was to draft and none did.

        llama.cpp serves without speculation if a draft does not fit.
        """
        speculation, drafting = self.arms[block.arm].speculation, block.drafting
        must_draft = speculation is not None and None not in (speculation.draft, speculation.k)
        if must_draft and drafting is not None and not drafting.num_drafted:
            raise ServerFailed("it served without drafting a single token; its log may say why")

    def _give_up(self, name: str, reason: str, load: Load | None = None) -> None:
        """Measure an arm no more at a load, or at all until the run is started again."""
        self.race.give_up(name, reason, load)
        if load is None:
            decided = self._recommended.items()
            self._recommended = {each: arm for each, arm in decided if arm != name}
        else:
            self.state.append(GivenUpRecord(arm=name, reason=reason, load=load))
        self.notify(f"{name} given up: {reason}")

    def _add(self, block: LoadBlock, is_final: bool) -> None:
        self._blocks.setdefault((block.arm, block.load, is_final), []).append(block)
        if not is_final:
            self.race.add(block.times)

    def _connect(self, arm: Arm) -> MeasuredServer:
        """Return a client with new connections: a paused server has closed its old ones."""
        return MeasuredServer(
            ClientConfig(
                url=arm.url,
                max_connections=max(load.clients for load in self.config.loads),
                num_tries=1,
                timeout_s=self.config.hang_s,
            )
        )

    def _find_deck(self, server: MeasuredServer) -> PromptDeck:
        """Return the prompts, as conversations if the first server that is measured takes them."""
        if self._deck is None:
            record = PromptsRecord(run=secrets.randbits(32), is_chat=server.can_chat())
            self._deck = self._make_deck(record)
            self.state.append(record)
        return self._deck

    def _make_deck(self, prompts: PromptsRecord) -> PromptDeck:
        """Deal the prompts of recorded blocks first: the order of the calls decides which."""
        entries = list_prompts(self.config.prompts, is_chat=prompts.is_chat)
        has_urls = any(not arm.command for arm in self.arms.values())
        self._deck = PromptDeck(entries, prompts.run, marks_all=has_urls)
        for record in self.state.records:
            if isinstance(record, BlockRecord):
                load, index = record.block.load, record.block.index
                self._deck.deal(load, index, count_requests(load), is_final=record.is_final)
        return self._deck

    def _warm_up(self, arm: Arm) -> None:
        """Send short requests from all clients to a server that has just started."""
        load = Load(clients=max(load.clients for load in self.config.loads))
        params = SamplingParams(max_tokens=WARM_UP_TOKENS)
        with self._connect(arm) as server:
            prompts = self._find_deck(server).deal_warm_up(load.clients)
            measure_load(server, prompts, params, arm=arm.name, load=load, index=-1)

    # ------------------------------------------------------------------------------ confirming

    def _confirm(self, load: Load) -> None:
        """Measure the fastest arm on other prompts and audit it, until one passes both."""
        while (best := self.race.recommend(load).arm) != self.race.baseline:
            if (reason := self._find_objection(best, load)) is None:
                break
            self._give_up(best, reason, load)
            self._choose()  # between those that were given up because this one was faster
        self._recommended[load] = self.race.recommend(load).arm

    def _find_objection(self, name: str, load: Load) -> str | None:
        """Return why an arm is not recommended after all; None if it is."""
        pair = (self.race.baseline, name)
        blocks = [
            (each, n)
            for n in range(self._count_confirming(load))
            for each in pair[:: -1 if n % 2 else 1]
            if n not in {b.index for b in self._blocks.get((each, load, True), ())}
        ]
        if self.fleet.one_at_a_time:
            blocks.sort(key=lambda block: pair.index(block[0]))
        for each, group in groupby(blocks, key=lambda block: block[0]):
            if not self._measure(each, [(load, index) for _, index in group], is_final=True):
                return "it failed while it was confirmed"  # its own reason is kept
        baseline, times = (
            [block.times for block in self._blocks[each, load, True]] for each in pair
        )
        speedup = self._confirmed[load] = estimate_speedup(times, baseline)
        if not pays(speedup):
            return f"not confirmed on other prompts: {speedup.show()}"
        try:
            check = self._check(name) if self.config.audit_tokens else None
        except ServerUnavailable as error:
            return f"it could not be audited: {error}"
        if (failure := self.fleet.find_failure(name)) is not None:
            return f"it ended in the audit: {failure}"
        if check is not None and check.has_alarm:
            return f"it changes the text: {check.sentence}"
        is_cleared = check is not None and check.status == "no_deviation"
        return None if is_cleared else self._compare_texts(name, load)

    def _compare_texts(self, name: str, load: Load) -> str | None:
        """Return the objection to an arm none of whose greedy texts is the baseline's."""
        pairs = (self._blocks[each, load, True] for each in (name, self.race.baseline))
        num_texts, share = compare_texts(*pairs)
        if load.temperature or share is None or share.estimate > 0.0:
            return None
        return f"none of its {num_texts} texts at T=0 is that of {self.race.baseline}"

    def _count_confirming(self, load: Load) -> int:
        """Return how many blocks of two arms fit into half of the time that is left, at least 3."""
        walls = [b.wall_s for b in self._blocks[self.race.baseline, load, False]]
        seconds_left = 60.0 * (self.config.minutes - self.minutes) / len(self.config.loads)
        return max(LEAST_BLOCKS, min(CONFIRM_BLOCKS, int(seconds_left / 4.0 / fmean(walls))))

    def _check(self, name: str) -> ExactnessCheck:
        """Audit the text of an arm once, for all loads."""
        if name not in self._checks:
            names = (name,) if self.fleet.one_at_a_time else (name, self.race.baseline)
            with self.fleet.use(*names) as running:
                self._checks[name] = check_text(
                    running[name],
                    running.get(self.race.baseline),
                    self.config.audit_tokens,
                    num_clients=max(load.clients for load in self.config.loads),
                    prompts=self.config.prompts,
                    notify=self.notify,
                )
            if self.fleet.find_failure(name) is None:
                self.state.append(AuditRecord(arm=name, report=asdict(self._checks[name])))
        return self._checks[name]

    # --------------------------------------------------------------------------------- results

    def _summarise(self, load: Load) -> LoadResult:
        """Return the arms at a load, and what is recommended there so far."""
        rows = []
        baseline = self._blocks.get((self.race.baseline, load, False), [])
        for standing in self.race.rank(load):
            blocks = self._blocks.get((standing.arm, load, False), [])
            share = None
            if load.temperature == 0.0 and standing.arm != self.race.baseline:
                share = compare_texts(blocks, baseline)[1]
            rows.append(
                ArmResult(
                    arm=standing.arm,
                    speedup=standing.speedup,
                    num_blocks=standing.num_blocks,
                    figures=compute_figures(blocks) if blocks else {},
                    drafting=sum_drafting(block.drafting for block in blocks),
                    equal_texts=None if share is None else share.estimate,
                    reason=standing.reason,
                )
            )
        recommended = self._recommended.get(load)
        return LoadResult(
            load=load,
            arms=tuple(rows),
            recommended=recommended,
            confirmed=None if recommended == self.race.baseline else self._confirmed.get(load),
            check=None if recommended is None else self._checks.get(recommended),
        )
