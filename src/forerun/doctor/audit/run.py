"""Runs an audit: sends requests until the text deviates from the reference or a limit ends it."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forerun.doctor.audit.config import AuditConfig, Kind
from forerun.doctor.audit.endpoint import MOST_REQUESTS, Endpoint
from forerun.doctor.audit.ledger import Deviation, Ledger, groups_of
from forerun.doctor.audit.records import Arm, AuditAnswer, Question, Setting, StateFile
from forerun.doctor.audit.reference import Reference
from forerun.doctor.audit.rounds import Amounts, AuditRounds, Chat, Prompt
from forerun.errors import InvalidRequest
from forerun.terminal_text import printable

Report = Callable[[str, float], None]

_MOST_FAILURES = 5
"""Consecutive failures after which the server counts as unreachable."""
_GRAMMARS_BY_CHANCE = 3


@dataclass(slots=True)
class Progress:
    """State of a running audit.

    Attributes:
        spent: tokens and requests, those in flight included.
        dropped: why kinds of request were given up.
        peak_log_e: largest e-value so far, as a logarithm.
        alarm_tokens: output tokens when it reached the alarm; None before.
    """

    spent: Amounts = field(default_factory=Amounts)
    dropped: dict[str, str] = field(default_factory=dict)
    problems: Counter[str] = field(default_factory=Counter)
    num_without_ids: int = 0
    peak_log_e: float = 0.0
    alarm_tokens: int | None = None
    elapsed_s: float = 0.0


class Audit:
    """One audit of an endpoint."""

    def __init__(
        self,
        config: AuditConfig,
        endpoint: Endpoint,
        reference: Reference | None,
        prompts: Sequence[Prompt | Chat],
        state: StateFile,
        *,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self.config = config
        self.endpoint = endpoint
        self.state = state
        self.wait = wait
        self.ledger = Ledger(config, reference, endpoint.max_context)
        self.progress = Progress()
        chats = [prompt for prompt in prompts if isinstance(prompt, Chat)]
        texts = [prompt for prompt in prompts if not isinstance(prompt, Chat)]
        self.rounds = AuditRounds(config, texts, chats, endpoint.max_context)
        self._num_failures = 0
        self._num_grammars = 0
        self._alarmed: Deviation | None = None
        self._confirmed: Counter[Arm] = Counter()
        names = {kind.name: kind for kind in config.kinds}
        if not chats and "chat" in names:
            self.progress.dropped["chat"] = "there is no chat template here"
        for name, kind in names.items():
            if reference is not None and not reference.can_judge(kind):
                why = "the log-probabilities that a server reports are those before its parameters"
                self.progress.dropped[name] = why
        if "biased" in names and any(isinstance(text, str) for text in texts):
            self.progress.dropped["biased"] = "the ids of the prompts are not known"

    def run(self, report: Report) -> None:
        """Resume from the state file and ask until the audit has ended."""
        started_s = time.monotonic()
        for question, answer in self.state.load():
            if question.kind not in self.ledger.kinds:
                raise InvalidRequest(
                    f"--state {self.state.path} has a question of the kind "
                    f"{printable(question.kind, max_length=100)!r}, which this forerun does not "
                    "ask; name another file"
                )
            self._count([question])
            self._add(question, answer)
        ends_s = started_s + self.config.max_seconds
        while time.monotonic() < ends_s and (questions := self._next()):
            numbers = self.state.ask(questions)
            self._count(questions)
            answers = self.endpoint.ask(questions, self.ledger.kinds)
            for number, question, answer in zip(numbers, questions, answers, strict=True):
                self.state.answer(number, answer)
                self._add(question, answer)
            if self._num_failures >= _MOST_FAILURES:
                break
            if self._num_failures:
                self.wait(min(60.0, 2.0 ** (self._num_failures - 1)))
            arm = "control" if self.progress.alarm_tokens is not None else "served"
            report(f"asking, {arm}", self.progress.spent.num_tokens)
        self.progress.elapsed_s = time.monotonic() - started_s

    def _count(self, questions: Sequence[Question]) -> None:
        self.rounds.count(questions)
        if self.progress.alarm_tokens is not None:
            for question in questions:
                self._confirmed[question.arm] += question.num_tokens

    def _add(self, question: Question, answer: AuditAnswer) -> None:
        progress = self.progress
        progress.spent.num_tokens += answer.num_charged
        progress.spent.num_requests += answer.num_requests
        if answer.problem is not None:
            progress.problems[answer.problem[:200]] += 1
        if answer.is_refused:
            progress.dropped.setdefault(question.kind, answer.problem or "refused")
        failed = answer.problem is not None and not answer.is_refused
        self._num_failures = self._num_failures + 1 if failed else 0
        if answer.token_ids is None and answer.problem is None:
            progress.num_without_ids += 1
        if self._is_judged(question, answer):
            self.ledger.add(question, answer)
        self.rounds.add(question, answer)
        if question.arm == "served":
            progress.peak_log_e = max(progress.peak_log_e, self.ledger.log_e)
            if progress.alarm_tokens is None and progress.peak_log_e >= self.alarm_log_e:
                progress.alarm_tokens = progress.spent.num_tokens

    def _is_judged(self, question: Question, answer: AuditAnswer) -> bool:
        """Whether an answer is judged: not if the server reads another prompt, or no grammars.

        First tokens show whether it ignores grammars, because no draft precedes them. A few of them
        may follow the grammar by chance.
        """
        if question.message and answer.num_prompt not in (None, len(question.prompt)):
            why = "the server's chat template makes other tokens than the reference's"
            self.progress.dropped.setdefault(question.kind, why)
        if not self.ledger.kinds[question.kind].has_grammar or not answer.text:
            return question.kind not in self.progress.dropped
        if self.endpoint.control == "off":  # forerun applies them
            return True
        if not answer.text[0].isdigit():
            self.progress.dropped.setdefault(question.kind, "the server does not apply grammars")
        self._num_grammars += 1
        return (
            question.kind not in self.progress.dropped and self._num_grammars > _GRAMMARS_BY_CHANCE
        )

    def describe_sizes(self) -> tuple[str, ...]:
        """Return how long prompts and answers were: of longer ones the audit says nothing."""
        prompts = [len(q.prompt) for q, _ in self.rounds.seen]
        answers = [len(a.token_ids or ()) for _, a in self.rounds.seen]
        if not prompts or not max(answers):
            return ()
        unit = "characters" if isinstance(self.rounds.seen[0][0].prompt, str) else "tokens"
        return (
            f"prompts had {min(prompts)} to {max(prompts)} {unit}, answers up to {max(answers)} "
            "tokens; nothing is known of longer ones",
        )

    def share_without_ids(self, group: str) -> float:
        """Return the share of served answers of a group whose token ids are unknown."""
        seen = [
            answer.token_ids is not None
            for question, answer in self.rounds.seen
            if group in groups_of(question, self.config)
        ]
        return 1.0 - sum(seen) / len(seen) if seen else 0.0

    @property
    def alarm_log_e(self) -> float:
        """Logarithm of the e-value at which the audit raises an alarm."""
        return -math.log(self.config.false_alarms)

    def _next(self) -> list[Question]:
        """Return the questions to ask at once; none if the audit has ended."""
        kinds = [k for k in self.config.kinds if k.name not in self.progress.dropped]
        spent, config = self.progress.spent, self.config
        limits = Amounts(
            config.max_tokens - spent.num_tokens, config.max_requests - spent.num_requests
        )
        if self.progress.alarm_tokens is not None:
            return self._confirm(limits)
        limits.num_tokens -= config.kept_tokens
        return self.rounds.choose("served", kinds, limits)

    def alarmed_kind(self, alarmed: Deviation) -> Kind:
        """Return the kind of request with the strongest evidence of a deviation."""
        kinds = [
            item
            for item in self.ledger.deviations("served")
            if item.group.startswith("kind ") and item.direction == alarmed.direction
        ]
        name = (kinds[0] if kinds else alarmed).group.removeprefix("kind ")
        return self.ledger.kinds.get(name, self.config.kinds[0])

    def _confirm(self, limits: Amounts) -> list[Question]:
        """After an alarm: what deviates without speculation and with it, by turns.

        With it, half is plain sampling, which shows whether that deviates too.
        """
        if self._alarmed is None:
            self._alarmed = self.ledger.deviations("served")[0]
        kind = self.alarmed_kind(self._alarmed)
        counts = self._confirmed
        plain = next((k for k in self.config.kinds if k.is_plain), kind)
        arm: Arm = "control" if counts["control"] <= counts["served"] else "served"
        if min(counts["control"], counts["served"]) >= self.config.confirm_tokens:
            return []
        if arm == "control" and self.endpoint.control == "first tokens" and not kind.has_grammar:
            most = min(self.config.num_clients, limits.num_tokens)
            most = min(most, limits.num_requests // MOST_REQUESTS)
            singles = [self.rounds.single(kind, offset) for offset in range(most)]
            return [question for question in singles if question is not None]
        kinds = [kind] if arm == "control" else [*{kind.name: kind, plain.name: plain}.values()]
        return self.rounds.choose(arm, kinds, limits, _choose_settings(self._alarmed.group))


def _choose_settings(group: str) -> Sequence[Setting]:
    """Return the rounds in which the tokens of a group are asked for."""
    if group == "clients 1":
        return ("alone",)
    if group in ("place beyond 64", "setting long"):
        return ("long",)
    if group == "setting again":
        return ("together", "together", "again")
    if group == "setting continued":
        return ("together", "continued")
    return ("aborted",) if group == "setting aborted" else ("together",)
