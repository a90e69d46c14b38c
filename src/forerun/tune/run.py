"""Runs a comparison of servers: measures in turns, confirms the fastest setting, audits it."""

from __future__ import annotations

import hashlib
import math
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
from forerun.client.urls import hide_keys
from forerun.errors import InvalidRequest, ServerUnavailable
from forerun.provenance import collect
from forerun.sampling.config import SamplingParams
from forerun.theory.intervals import Interval
from forerun.tune.arms import Arm, Load
from forerun.tune.check import TOO_SHORT, ExactnessCheck, check_text
from forerun.tune.config import TuneConfig
from forerun.tune.drafting import find_drafting, sum_drafting
from forerun.tune.fleet import Fleet, Notify
from forerun.tune.load import (
    LoadBlock,
    PromptDeck,
    RefusedPrompt,
    compare_texts,
    compute_figures,
    count_requests,
    list_prompts,
    measure_load,
)
from forerun.tune.process import ServerFailed
from forerun.tune.race import LEAST_BLOCKS, LEAST_STARTS, NO_TIME, Race, estimate_speedup, pays
from forerun.tune.report import ArmResult, LoadResult, TuneReport
from forerun.tune.server import MeasuredServer
from forerun.tune.state import AuditRecord, BlockRecord, GivenUpRecord, PromptsRecord, RunState

RACE_SHARES = (0.4, 0.7)
"""Least and largest share of the minutes for choosing; the rest confirms and audits the choice."""
CONFIRM_BLOCKS, CONFIRM_STARTS = 8, 4
"""Most blocks of the chosen arm and of the baseline on prompts that had no part in the choice, and
most starts of their servers, where these run one at a time."""
OVERTIME_SHARE = 0.1
"""Share of the minutes that the confirmation, and then the audit, may take beyond them."""
LEAST_LIMIT_S = 10.0
"""Seconds that a start, an answer or an audit may take, however little time is left."""
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
        self._deck: PromptDeck | None = None
        self._blocks: dict[tuple[str, Load, bool], list[LoadBlock]] = {}
        self._prompts = PromptsRecord(run=0, is_chat=True)
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
            InvalidRequest: the baseline refuses what it is asked.
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
            left_out=tuple(map(": ".join, self._prompts.left_out.items())),
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
        self.race.finish_round(self._find_choosing_s())  # of what an interrupted run measured
        while planned := self.race.plan_round():
            for name, group in groupby(planned, key=lambda block: block[0]):
                if self._blocks and self._find_choosing_s() <= 0.0:
                    self.race.end()
                    return
                self._measure(name, [(load, index) for _, load, index in group])
            if self.fleet.one_at_a_time and self.race.blocks_per_round == 1:
                self.race.blocks_per_round = BLOCKS_PER_START
            start_s = max(self.fleet.start_s.values(), default=0.0)
            arm_s = start_s if self.fleet.one_at_a_time else 0.0
            for one in self.race.finish_round(self._find_choosing_s(), arm_s):
                self.notify(f"{one.load.label}: {one.arm} given up: {one.reason}")

    def _find_seconds_left(self) -> float:
        return 60.0 * (self.config.minutes - self.minutes)

    def _find_choosing_s(self) -> float:
        """Return the seconds that are left to choose; the others confirm and audit."""
        pair = (self.race.baseline, self.race.baseline)  # what will be confirmed is not known yet
        kept_s = sum(self._plan_units(load, pair)[2] for load in self._list_undecided())
        least_s, most_s = (
            60.0 * (1.0 - share) * self.config.minutes for share in RACE_SHARES[::-1]
        )
        return self._find_seconds_left() - min(most_s, max(kept_s, least_s))

    def _measure(
        self, name: str, blocks: Sequence[tuple[Load, int]], is_final: bool = False
    ) -> bool:
        """Measure blocks of one arm; returns whether its server answered them all.

        Raises:
            ServerFailed or InvalidRequest: it is the baseline, which all are compared with.
        """
        units: dict[Load, int] = {}
        unknown_s = math.inf if name == self.race.baseline else 0.0
        usual_s = 3.0 * max(self.fleet.start_s.values(), default=unknown_s)
        limit_s = max(LEAST_LIMIT_S, usual_s, self._find_seconds_left() / 2.0)
        self.fleet.ready_s = min(self.config.ready_s, limit_s)
        if self.fleet.one_at_a_time:
            self.fleet.stop(name)  # these blocks are of a start of their own
        try:
            with self.fleet.use(name):
                for load, index in blocks:
                    if not is_final and self._blocks and self._find_choosing_s() <= 0.0:
                        break
                    what = "confirming" if is_final else "measuring"
                    self.notify(f"{load.label}: {what} {name}, block {index + 1}")
                    while (block := self._try_block(name, load, index, is_final)) is None:
                        pass
                    if self.fleet.one_at_a_time:
                        block = replace(block, unit=units.setdefault(load, index))
                    self._add(block, is_final)
                    self.state.append(BlockRecord(block=block, is_final=is_final))
                    self._check_drafts(block)
        except (InvalidRequest, ServerUnavailable) as error:
            reason = self.fleet.find_failure(name) or str(error)
            self.fleet.stop(name)
            if name == self.race.baseline:
                kind = InvalidRequest if isinstance(error, InvalidRequest) else ServerFailed
                raise kind(f"{name}, which the others are compared with: {reason}") from error
            self._give_up(name, reason)
            return False
        return True

    def _try_block(self, name: str, load: Load, index: int, is_final: bool) -> LoadBlock | None:
        """Measure a block; None where a prompt was refused that no arm took, and is left out."""
        params = SamplingParams(max_tokens=self.config.max_tokens)
        with self._connect(self.arms[name]) as server:
            if "server" not in self.versions and (version := server.read_version()):
                self.versions["server"] = version
            deck = self._find_deck(server)
            prompts = deck.deal(load, index, count_requests(load), is_final=is_final)
            before = server.read_metrics()
            try:
                block = measure_load(server, prompts, params, arm=name, load=load, index=index)
            except RefusedPrompt as error:
                if any(index in self._list_measured(arm, load, is_final) for arm in self.arms):
                    raise
                refused = {deck.find_name(load, index, error.place, is_final): str(error)}
                left_out = {**self._prompts.left_out, **refused}
                self._make_deck(msgspec.structs.replace(self._prompts, left_out=left_out))
                self.state.append(self._prompts)
                return None
            after = before and server.read_metrics()
            return replace(block, drafting=find_drafting(block.answers, before, after))

    def _list_measured(self, arm: str, load: Load, is_final: bool) -> set[int]:
        """Return the indices of the blocks of an arm."""
        return {block.index for block in self._blocks.get((arm, load, is_final), ())}

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
        elif reason != NO_TIME:  # the next run has time again
            self.state.append(GivenUpRecord(arm=name, reason=reason, load=load))
        self.notify(f"{name} given up: {reason}")

    def _add(self, block: LoadBlock, is_final: bool) -> None:
        self._blocks.setdefault((block.arm, block.load, is_final), []).append(block)
        if not is_final:
            self.race.add(block.times)

    def _connect(self, arm: Arm) -> MeasuredServer:
        """Return a client with new connections: a paused server has closed its old ones."""
        blocks = (block for every in self._blocks.values() for block in every)
        slowest_s = max((a.total_s for block in blocks for a in block.answers), default=0.0)
        limit_s = round(max(LEAST_LIMIT_S, 2.0 * slowest_s, self._find_seconds_left() / 4.0))
        return MeasuredServer(
            ClientConfig(
                url=arm.url,
                max_connections=max(load.clients for load in self.config.loads),
                num_tries=1,
                timeout_s=min(self.config.hang_s, limit_s),
                stream_s=limit_s,
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
        self._prompts = prompts
        self._deck = PromptDeck(entries, prompts.run, marks_all=has_urls, left_out=prompts.left_out)
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
        if (problem := self._measure_pair(pair, load)) is not None:
            return problem
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

    def _measure_pair(self, pair: tuple[str, str], load: Load) -> str | None:
        """Measure two arms on prompts that no earlier one was confirmed on; return what failed."""
        num_units, size, _ = self._plan_units(load, pair)
        if not num_units:
            return NO_TIME
        others = (self._list_measured(arm, load, True) for arm in self.arms if arm not in pair)
        first = 1 + max((index for indices in others for index in indices), default=-1)
        for unit in range(num_units):
            indices = range(first + unit * size, first + (unit + 1) * size)
            for each in pair[:: -1 if unit % 2 else 1]:
                left = sorted({*indices} - self._list_measured(each, load, True))
                blocks = [(load, index) for index in left]
                if left and not self._measure(each, blocks, is_final=True):
                    return "it failed while it was confirmed"  # its own reason is kept
        return None

    def _compare_texts(self, name: str, load: Load) -> str | None:
        """Return the objection to an arm none of whose greedy texts is the baseline's."""
        pairs = (self._blocks[each, load, True] for each in (name, self.race.baseline))
        num_texts, share = compare_texts(*pairs)
        if load.temperature or share is None or share.estimate > 0.0:
            return None
        return f"none of its {num_texts} texts at T=0 is that of {self.race.baseline}"

    def _plan_units(self, load: Load, pair: Sequence[str]) -> tuple[int, int, float]:
        """Return the units of a confirmation, the blocks of each, and the seconds of the fewest.

        A unit is a block, or one start where servers run one at a time. Units take half of the time
        that is left at most; there is none where not even the fewest fit into all of it.
        """
        least, most, size = LEAST_BLOCKS, CONFIRM_BLOCKS, 1
        unit_s, is_alone = 0.0, self.fleet.one_at_a_time
        if is_alone:
            least, most, size = LEAST_STARTS, CONFIRM_STARTS, CONFIRM_BLOCKS // CONFIRM_STARTS
        for name in pair:
            walls = [block.wall_s for block in self._blocks.get((name, load, False), ())]
            unit_s += size * fmean(walls) if walls else 0.0
            unit_s += self.fleet.start_s.get(name, 0.0) if is_alone else 0.0
        left_s = self._find_confirming_s()
        fitting = int(left_s / 2.0 / unit_s) if unit_s else most
        num_units = max(least, min(most, fitting)) if least * unit_s <= left_s else 0
        return num_units, size, least * unit_s

    def _find_confirming_s(self) -> float:
        """Return the seconds that are left to confirm and audit at one load."""
        overtime_s = 60.0 * OVERTIME_SHARE * self.config.minutes / len(self.config.loads)
        return self._find_seconds_left() / len(self._list_undecided()) + overtime_s

    def _check(self, name: str) -> ExactnessCheck:
        """Audit the text of an arm once, for all loads."""
        if name not in self._checks:
            names = (name,) if self.fleet.one_at_a_time else (name, self.race.baseline)
            with self.fleet.use(*names) as running:
                self._checks[name] = check_text(
                    running[name],
                    running.get(self.race.baseline),
                    self.config,
                    max(LEAST_LIMIT_S, self._find_confirming_s()),
                    self.notify,
                )
            is_over = self._checks[name].sentence != TOO_SHORT  # else the next run audits it again
            if is_over and self.fleet.find_failure(name) is None:
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
        finals = self._blocks.get((recommended or "", load, True), ())
        has_units = any(block.unit != block.index for block in finals)
        return LoadResult(
            load=load,
            arms=tuple(rows),
            recommended=recommended,
            confirmed=None if recommended == self.race.baseline else self._confirmed.get(load),
            check=None if recommended is None else self._checks.get(recommended),
            num_starts=len({b.unit for b in finals}) if has_units else 0,
        )
