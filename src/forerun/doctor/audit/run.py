"""Runs an audit: sends requests until the text deviates from the reference or a limit ends it."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from forerun.doctor.audit.config import AuditConfig, Kind
from forerun.doctor.audit.endpoint import MOST_REQUESTS, Endpoint
from forerun.doctor.audit.ledger import Ledger
from forerun.doctor.audit.records import Arm, AuditAnswer, Question, StateFile
from forerun.doctor.audit.reference import Reference
from forerun.errors import InvalidRequest
from forerun.terminal_text import printable

Prompt = tuple[int, ...] | str
Report = Callable[[str, float], None]

_MOST_FAILURES = 5
"""Consecutive failures after which the server counts as unreachable."""
_GRAMMARS_BY_CHANCE = 3
_GREEDY_TIMES, _SAMPLED_TIMES = 1, 2
"""How often a prompt is sent in succession, to see whether an answer repeats the one before."""


@dataclass(slots=True)
class Spent:
    """Tokens and requests that count against the limits of an audit."""

    num_tokens: int = 0
    num_requests: int = 0


@dataclass(slots=True)
class Progress:
    """State of a running audit.

    Attributes:
        spent: tokens and requests, those in flight included.
        dropped: why kinds of request were given up.
        peak_log_e: largest e-value so far, as a logarithm.
        alarm_tokens: output tokens when it reached the alarm; None before.
    """

    spent: Spent = field(default_factory=Spent)
    asked: Counter[tuple[Arm, str]] = field(default_factory=Counter)
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
        prompts: Sequence[Prompt],
        state: StateFile,
        *,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self.config = config
        self.endpoint = endpoint
        self.prompts = prompts
        self.state = state
        self.wait = wait
        self.ledger = Ledger(config, reference)
        self.progress = Progress()
        self._num_asked: Counter[tuple[Arm, str]] = Counter()
        self._num_failures = 0
        self._num_grammars = 0
        self._confirmed: list[tuple[Arm, Kind]] = []
        self._texts: list[tuple[Question, AuditAnswer]] = []

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
            self._count(question)
            self._add(question, answer)
        while questions := self._next():
            numbers = self.state.ask(questions)
            for question in questions:
                self._count(question)
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

    def _count(self, question: Question) -> None:
        self.progress.asked[question.arm, question.kind] += question.num_tokens
        self._num_asked[question.arm, question.kind] += 1

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
        if question.arm == "served":
            kept = msgspec.structs.replace(answer, top=(), logprobs=(), step_sizes=())
            self._texts.append((question, kept))
            progress.peak_log_e = max(progress.peak_log_e, self.ledger.log_e)
            if progress.alarm_tokens is None and progress.peak_log_e >= self.alarm_log_e:
                progress.alarm_tokens = progress.spent.num_tokens

    def _is_judged(self, question: Question, answer: AuditAnswer) -> bool:
        """Whether an answer is judged: those to grammars are not if the server ignores grammars.

        First tokens show that, because no draft precedes them. A few of them may follow the grammar
        by chance.
        """
        is_known = self.endpoint.control == "off"  # forerun
        if is_known or not self.ledger.kinds[question.kind].has_grammar or not answer.text:
            return True
        if not answer.text[0].isdigit():
            self.progress.dropped.setdefault(question.kind, "the server does not apply grammars")
        self._num_grammars += 1
        return (
            question.kind not in self.progress.dropped and self._num_grammars > _GRAMMARS_BY_CHANCE
        )

    def share_without_ids(self, kind: str) -> float:
        """Return the share of served answers to a kind of request whose token ids are unknown."""
        known = [answer.token_ids is not None for q, answer in self._texts if q.kind == kind]
        return 1.0 - sum(known) / len(known)

    @property
    def alarm_log_e(self) -> float:
        """Logarithm of the e-value at which the audit raises an alarm."""
        return -math.log(self.config.false_alarms)

    def _next(self) -> list[Question]:
        """Return the questions to ask at once; none if the audit has ended."""
        kinds = [k for k in self.config.kinds if k.name not in self.progress.dropped]
        if not kinds:
            return []
        spent = self.progress.spent
        left = self.config.max_tokens - spent.num_tokens
        requests = self.config.max_requests - spent.num_requests
        if self.progress.alarm_tokens is not None:
            return self._further_questions(left, requests)
        left -= int(self.config.control_share * self.config.max_tokens)
        found: list[Question] = []
        # The first question is sent alone: it shows whether the server answers at all.
        most = self.config.num_clients if spent.num_requests else 1
        asked = Counter(self.progress.asked)
        for _ in range(most):
            if requests < MOST_REQUESTS or left < self.config.num_tokens:
                break
            kind = min(kinds, key=lambda k: asked["served", k.name] / k.share)
            found.append(self._question("served", kind, found))
            asked["served", kind.name] += self.config.num_tokens
            left, requests = left - self.config.num_tokens, requests - MOST_REQUESTS
        return found

    def _question(self, arm: Arm, kind: Kind, others: Sequence[Question]) -> Question:
        number = self._num_asked[arm, kind.name]
        number += sum(q.kind == kind.name and q.arm == arm for q in others)
        times = _GREEDY_TIMES if kind.temperature == 0.0 else _SAMPLED_TIMES
        place = number // times
        return Question(
            arm=arm,
            kind=kind.name,
            prompt=self.prompts[place % len(self.prompts)],
            num_tokens=self.config.num_tokens,
            group=place * len(self.config.kinds) + self.config.kinds.index(kind),
        )

    @property
    def alarmed_kind(self) -> Kind:
        """The kind of request with the strongest evidence of a deviation."""
        deviations = self.ledger.deviations("served")
        return self.ledger.kinds[deviations[0].kind] if deviations else self.config.kinds[0]

    def _further_questions(self, left: int, requests: int) -> list[Question]:
        """After an alarm: more of the kind that deviates, and as much without speculation."""
        asked = self.progress.asked
        if not self._confirmed:
            alarmed = self.alarmed_kind
            self._confirmed = [("served", alarmed), ("served", self.config.kinds[0])]
            self._confirmed.append(("control", alarmed))
        for arm, kind in self._confirmed:
            few = asked[arm, kind.name] < self.config.confirm_tokens
            if few and kind.name not in self.progress.dropped:
                break
        else:
            return []
        single = arm == "control" and self.endpoint.control == "first tokens"
        size = 1 if single and not kind.has_grammar else self.config.num_tokens
        found: list[Question] = []
        for _ in range(self.config.num_clients):
            if requests < MOST_REQUESTS or left < size:
                break
            if size == 1:
                found.append(self._single(kind, len(found)))
            else:
                found.append(self._question(arm, kind, found))
            left, requests = left - size, requests - MOST_REQUESTS
        return found

    def _single(self, kind: Kind, offset: int) -> Question:
        """Ask for one token after the beginning of an answer: a first token is never drafted."""
        number = self._num_asked["control", kind.name] + offset
        whole = [(q, a) for q, a in self._texts if q.kind == kind.name and (a.token_ids or a.text)]
        question, answer = whole[number % len(whole)]
        if isinstance(question.prompt, str):
            prompt: Prompt = question.prompt + answer.text[: number % max(1, len(answer.text))]
        else:
            ids = answer.token_ids or ()
            prompt = question.prompt + ids[: number % max(1, len(ids))]
        return Question(
            arm="control", kind=kind.name, prompt=prompt, num_tokens=1, group=-1 - number
        )
