"""Chooses the requests of an audit: their kinds, prompts, and how they are sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from forerun.doctor.audit.config import ROUNDS, AuditConfig, Kind
from forerun.doctor.audit.endpoint import MOST_REQUESTS
from forerun.doctor.audit.records import Arm, AuditAnswer, Question, Setting

Prompt = tuple[int, ...] | str
_WHOLE_EVERY, _CUT_EVERY = 5, 3
"""Of so many requests one is answered whole, and of so many one is cut off where some are."""
_CUT_AFTER = 6
_FIRST_SINGLE = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A message to a model, and the prompt that the chat template makes of it."""

    message: str
    ids: tuple[int, ...]


@dataclass(slots=True)
class Amounts:
    """Output tokens and requests: those spent, or those that may still be spent."""

    num_tokens: int = 0
    num_requests: int = 0


class AuditRounds:
    """Chooses what is asked next, from what was asked and answered until now.

    Attributes:
        asked: output tokens asked for.
        seen: served answers, without their log-probabilities.
    """

    def __init__(
        self,
        config: AuditConfig,
        prompts: Sequence[Prompt],
        chats: Sequence[Chat],
        max_context: int | None,
    ) -> None:
        self.config = config
        self.prompts = prompts
        self.chats = chats
        self.max_context = max_context
        self.asked: Counter[tuple[Arm, str]] = Counter()
        self.seen: list[tuple[Question, AuditAnswer]] = []
        self._num_new: Counter[Arm] = Counter()
        self._num_rounds: Counter[Arm] = Counter()
        self._together: dict[Arm, list[list[Question]]] = {"served": [], "control": []}
        self._has_whole_ids = True

    def count(self, questions: Sequence[Question]) -> None:
        """Count a round that is sent."""
        for question in questions:
            self.asked[question.arm, question.kind] += question.num_tokens
            together = self._together[question.arm]
            if question.round >= self._num_rounds[question.arm] and question.setting == "together":
                together.append([])
            self._num_rounds[question.arm] = max(self._num_rounds[question.arm], question.round + 1)
            if question.setting == "together":
                together[-1].append(question)
            if question.group < _FIRST_SINGLE:
                self._num_new[question.arm] = max(self._num_new[question.arm], question.group + 1)

    def add(self, question: Question, answer: AuditAnswer) -> None:
        """Add the answer to a question."""
        if question.arm == "served":
            self.seen.append((question, msgspec.structs.replace(answer, top=(), logprobs=())))
            if not question.is_streamed and answer.text and answer.token_ids is None:
                self._has_whole_ids = False

    def choose(
        self, arm: Arm, kinds: Sequence[Kind], limits: Amounts, settings: Sequence[Setting] = ROUNDS
    ) -> list[Question]:
        """Return the questions of the next round that the limits allow."""
        number = self._num_rounds[arm]
        setting = settings[number % len(settings)]
        asked, found = Counter(self.asked), list[Question]()
        counts = {"alone": 1, "long": max(1, self.config.num_clients // 2)}
        earlier = self._together[arm]
        if setting == "again" and len(earlier) > 1:
            again = [msgspec.structs.replace(q, setting=setting, round=number) for q in earlier[-2]]
        else:
            again = []
        # The first request is sent alone: it shows whether the server answers at all.
        most = len(again) or counts.get(setting, self.config.num_clients)
        for place in range(most):
            if again:
                question = again[place]
            else:
                kind = min(
                    (k for k in kinds if self._is_possible(k)),
                    key=lambda k: asked[arm, k.name] / k.share,
                    default=None,
                )
                if kind is None:
                    break
                question = self._ask(arm, kind, setting, number, place)
            if question.num_tokens > limits.num_tokens:
                question = msgspec.structs.replace(question, num_tokens=self.config.num_tokens)
            if limits.num_requests < MOST_REQUESTS or limits.num_tokens < question.num_tokens:
                break
            limits.num_tokens -= question.num_tokens
            limits.num_requests -= MOST_REQUESTS
            asked[arm, question.kind] += question.num_tokens
            found.append(question)
        return found

    def _is_possible(self, kind: Kind) -> bool:
        if kind.is_chat:
            return bool(self.chats)
        return not kind.has_stop or any(answer.text for _, answer in self.seen)

    def _ask(self, arm: Arm, kind: Kind, setting: Setting, number: int, place: int) -> Question:
        at = self._num_new[arm] + place
        is_cut = setting == "aborted" and place % _CUT_EVERY == 0
        is_whole = kind.is_chat or (self._has_whole_ids and at % _WHOLE_EVERY == _WHOLE_EVERY - 1)
        chat = self.chats[at % len(self.chats)] if kind.is_chat else None
        prompt = self.prompts[at % len(self.prompts)] if chat is None else chat.ids
        if setting == "continued" and chat is None:
            prompt = self._continue(at, prompt)
        return Question(
            arm=arm,
            kind=kind.name,
            prompt=prompt,
            num_tokens=self._fit(prompt, self.config.size_of(setting)),
            group=at,
            round=number,
            setting=setting,
            message="" if chat is None else chat.message,
            stop=self._choose_stop() if kind.has_stop else "",
            cut_at=_CUT_AFTER if is_cut else None,
            is_streamed=is_cut or not is_whole,
        )

    def _fit(self, prompt: Prompt, num_tokens: int) -> int:
        """Return how many tokens an answer may have in the context of the server."""
        if self.max_context is None or isinstance(prompt, str):
            return num_tokens
        # To be scored, a text is sent back with room for one more token.
        return max(2, min(num_tokens, self.max_context - len(prompt) - 1))

    def _continue(self, at: int, prompt: Prompt) -> Prompt:
        """Return an earlier prompt with the first half of its answer, a prefix that was served."""
        recent = [
            (q, a.token_ids)
            for q, a in self.seen[-4 * self.config.num_clients :]
            if a.token_ids and not q.message and not isinstance(q.prompt, str)
        ]
        if not recent:
            return prompt
        question, ids = recent[at % len(recent)]
        assert not isinstance(question.prompt, str)
        begun = question.prompt + ids[: (len(ids) + 1) // 2]
        longest = len(begun) + self.config.num_tokens + 1
        return prompt if self.max_context is not None and longest > self.max_context else begun

    def _choose_stop(self) -> str:
        """Return the two characters that occur in most of the earlier texts."""
        pairs: Counter[str] = Counter()
        for _, answer in self.seen[:64]:
            text = answer.text
            pairs.update({text[i : i + 2] for i in range(len(text) - 1)})
        return max(sorted(pairs), key=lambda pair: pairs[pair], default="\n")

    def single(self, kind: Kind, offset: int) -> Question | None:
        """Ask for one token after the beginning of an answer: a first token is never drafted."""
        whole = [(q, a) for q, a in self.seen if q.kind == kind.name and (a.token_ids or a.text)]
        if not whole:
            return None
        number = self.asked["control", kind.name] + offset
        question, answer = whole[number % len(whole)]
        if isinstance(question.prompt, str):
            prompt: Prompt = question.prompt + answer.text[: number % max(1, len(answer.text))]
        else:
            ids = answer.token_ids or ()
            prompt = question.prompt + ids[: number % max(1, len(ids))]
        return Question(
            arm="control",
            kind=kind.name,
            prompt=prompt,
            num_tokens=1,
            group=_FIRST_SINGLE + number,
            round=self._num_rounds["control"],
        )
