"""Conformance suite for third-party drafters: `check_drafter`.

A drafter is code that the engine calls in the middle of every step, so that a small
misunderstanding of the contract can bias a text, leak memory or cost speed without an error. The
suite runs a drafter under the engine in the situations that occur in service and raises an
AssertionError with the reason at the first violation.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from forerun.control.base import Plan, Tree
from forerun.control.named import FixedController
from forerun.drafters.base import (
    Drafter,
    DraftRequest,
    Pause,
    StepOutcome,
)
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.models.base import LanguageModel
from forerun.models.tokenizers import Tokenizer
from forerun.sampling.config import SamplingParams
from forerun.sampling.proposal import Proposal
from forerun.theory.splitmix import finalise

TREE = Tree(num_nodes=6, depth=3, width=3)


class Recorder(Drafter):
    """Forwards all calls to a drafter, and records its proposals and any changed inputs.

    Args:
        fails_at: number of the call of `propose` that raises after the drafter has answered; the
            engine then drops the drafter's state and reports all rows again.
    """

    def __init__(self, inner: Drafter, fails_at: int | None = None) -> None:
        self.inner = inner
        self.method = inner.method
        self.required_features = inner.required_features
        self.required_top_k = inner.required_top_k
        self.fails_at = fails_at
        self.num_calls = 0
        self.proposals: dict[tuple[str, int], Proposal] = {}
        self.problems: list[str] = []

    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> Sequence[Proposal | Pause | None]:
        """Forward to the drafter, and record its proposals by request and committed length."""
        before = [list(request.ids) for request in requests]
        answers = self.inner.propose(requests, plans)
        self.num_calls += 1
        for request, ids in zip(requests, before, strict=True):
            if request.ids != ids:
                self.problems.append(
                    f"propose changed the ids of request {request.request_id}; they belong to the "
                    "engine: copy them"
                )
        if self.num_calls == self.fails_at:
            raise PlannedFailure
        for request, answer in zip(requests, answers, strict=False):
            if isinstance(answer, Proposal) and answer.num_drafted:
                self.proposals[request.request_id, len(request.ids)] = answer
        return answers

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        self.inner.observe(outcomes)

    def forget(self, request_id: str) -> None:
        self.inner.forget(request_id)


class PlannedFailure(Exception):
    """Raised by the conformance suite to make the engine drop a drafter's state."""


class Failures(logging.Handler):
    """Collects the messages by which the engine reports a drafter's failures."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if PlannedFailure.__name__ not in repr(record.args):
            self.messages.append(record.getMessage())


Factory = Callable[[], Drafter]
Texts = list[tuple[int, ...]]

MAX_SCORE = 5.0
"""Standard errors that log-probabilities of drawn tokens may be off: once in 2 million tests."""


def check_drafter(  # noqa: PLR0913 (keyword-only sizes)
    drafter_factory: Factory,
    target: LanguageModel,
    tokenizer: Tokenizer,
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    max_tokens: int = 24,
    num_speculative_tokens: int = 4,
    num_sampled: int = 32,
) -> None:
    """Check that a drafter fulfils the contract of `forerun.drafters.base.Drafter`.

    The suite checks that texts are those of plain decoding (greedy, seeded, with penalties, with
    plans for trees, after a preemption, an abort and the loss of the drafter's state), that the
    drafter raises nothing and that the engine refuses none of its proposals, that it leaves the
    requests unchanged, that proposals are reproducible given the noise, and that tokens proposed as
    sampled were drawn from `draft_probs` and kept whatever was drawn.
    """
    vocab_size = target.vocab_size
    texts = [list(ids) for ids in prompts or ()] or [
        [finalise(1000 * prompt + place) % vocab_size for place in range(length)]
        for prompt, length in enumerate((3, 1, 12, 30))
    ]
    if len(texts) < 3:
        raise AssertionError(f"check_drafter needs at least 3 prompts, not {len(texts)}")
    check = Check(drafter_factory, target, tokenizer, texts, max_tokens, num_speculative_tokens)
    check.check_interface()
    for name, params in parameters(max_tokens).items():
        check.check_text(name, params)
    check.check_tree_plans()
    check.check_new_state()
    check.check_preemption()
    check.check_abort()
    check.check_reproducible()
    check.check_draws(num_sampled)


def parameters(max_tokens: int) -> dict[str, SamplingParams]:
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    seeded = replace(greedy, temperature=1.0, seed=5)
    return {
        "greedy": greedy,
        "seeded": seeded,
        "greedy with penalties": replace(greedy, repetition_penalty=1.3, frequency_penalty=0.4),
        "seeded with top_p": replace(seeded, top_p=0.9, temperature=0.7),
    }


@dataclass(slots=True, eq=False)
class Check:
    """Runs all conformance checks on one drafter."""

    factory: Factory
    target: LanguageModel
    tokenizer: Tokenizer
    prompts: list[list[int]]
    max_tokens: int
    k: int
    recorded: dict[str, Recorder] = field(default_factory=dict)
    plain_texts: dict[tuple[SamplingParams, int], Texts] = field(default_factory=dict)

    def check_interface(self) -> None:
        """Check the types of names and layers, and that `forget` accepts unknown requests."""
        drafter: Any = self.factory()
        if not isinstance(drafter, Drafter):
            raise AssertionError(f"{type(drafter).__name__} is no subclass of Drafter")
        method: Any = getattr(drafter, "method", None)
        layers: Any = drafter.required_features
        if not isinstance(method, str) or not method or method == "plain":
            raise AssertionError(f'method is {method!r}; it must be a name other than "plain"')
        if not isinstance(layers, tuple) or not all(isinstance(layer, int) for layer in layers):
            raise AssertionError(f"required_features is {layers!r}; it must be a tuple of layers")
        try:
            drafter.forget("a request that was never seen")
        except Exception as error:
            raise AssertionError(
                f"forget raised {error!r} for an unknown request; it must ignore such ids"
            ) from error

    def check_text(self, name: str, params: SamplingParams) -> None:
        self.recorded[name] = Recorder(self.factory())
        found = self.decode(self.recorded[name], params)
        self.compare(name, found, self.plain(params))

    def check_tree_plans(self) -> None:
        """Check that proposals stay within a tree plan and that the text does not change."""
        recorder = Recorder(self.factory())
        for name, params in [*parameters(self.max_tokens).items()][:2]:
            found = self.decode(recorder, params, controller=FixedController(TREE, recorder.method))
            self.compare(f"{name}, plans for trees", found, self.plain(params))

    def check_new_state(self) -> None:
        """Check that a drafter recovers after the state of its requests was dropped."""
        for name, params in [*parameters(self.max_tokens).items()][:2]:
            recorder = Recorder(self.factory(), fails_at=2)
            found = self.decode(recorder, params)
            self.compare(f"{name}, state dropped in the middle", found, self.plain(params))
            found = self.decode(recorder, params, prompts=self.prompts[::-1])
            plain = self.plain(params, -1)
            self.compare(f"{name}, the same ids used again", found, plain)

    def check_preemption(self) -> None:
        """Check that a request that was preempted continues with the same text."""
        params = parameters(self.max_tokens)["seeded"]
        longest = max(map(len, self.prompts)) + self.max_tokens
        limits: dict[str, Any] = {"max_context": longest, "max_kv_tokens": longest + self.k}
        found = self.decode(Recorder(self.factory()), params, **limits)
        self.compare("seeded, with preemptions", found, self.plain(params))

    def check_abort(self) -> None:
        """Check that aborting a request does not change the text of the others."""
        params = parameters(self.max_tokens)["seeded"]
        recorder = Recorder(self.factory())
        with self.watched(recorder):
            engine = self.engine(recorder)
            for index, ids in enumerate(self.prompts):
                engine.add_request(ids, params, f"request-{index}")
            for _ in range(3):
                engine.step()
            engine.abort("request-1")
            while engine.has_unfinished:
                engine.step()
            kept = [index for index in range(len(self.prompts)) if index != 1]
            found = [tuple(engine.take_output(f"request-{i}").token_ids) for i in kept]
        plain = self.plain(params)
        self.compare("seeded, one request aborted", found, [plain[index] for index in kept])

    def check_reproducible(self) -> None:
        """Check that two new drafters make the same proposals for the same requests."""
        for name, params in parameters(self.max_tokens).items():
            first, second = self.recorded[name], Recorder(self.factory())
            self.decode(second, params)
            for place in sorted(first.proposals.keys() | second.proposals.keys()):
                one, other = first.proposals.get(place), second.proposals.get(place)
                if not _same_proposal(one, other):
                    raise AssertionError(
                        f"{name}: two fresh drafters propose differently for request {place[0]} at "
                        f"{place[1]} tokens; draw from the noise of `request.noise_key` alone"
                    )

    def check_draws(self, num_sampled: int) -> None:
        """Check that sampled tokens follow the `draft_probs` of their proposals.

        Under `draft_probs` the log-probability of a drawn token has a known mean and variance.
        Their sum over all drawn tokens shows both rows that are not those drawn from and drafts
        cut by their own tokens.
        """
        params = parameters(self.max_tokens)["seeded"]
        total = variance = 0.0
        for seed in range(num_sampled):
            recorder = Recorder(self.factory())
            is_tree = seed % 2 and recorder.inner.max_width > 1
            self.decode(
                recorder,
                replace(params, seed=seed, verification="traversal" if is_tree else "block"),
                controller=FixedController(TREE, recorder.method) if is_tree else None,
                max_batch=len(self.prompts),
            )
            for proposal in recorder.proposals.values():
                excess, spread = _log_excess(proposal)
                total, variance = total + excess, variance + spread
        if variance > 0 and abs(total) > MAX_SCORE * math.sqrt(variance):
            direction = "likelier" if total > 0 else "less likely"
            raise AssertionError(
                f"sampled tokens are {direction} under draft_probs than draws from them "
                f"({total / math.sqrt(variance):+.1f} standard errors): hand in the rows that were "
                "drawn from, and keep a node whatever token was drawn for it"
            )

    def plain(self, params: SamplingParams, order: int = 1) -> Texts:
        """Return the texts of plain decoding of all prompts, in their order (1) or the other (-1).

        They are decoded once.
        """
        key = params, order
        if key not in self.plain_texts:
            self.plain_texts[key] = self.decode(None, params, prompts=self.prompts[::order])
        return self.plain_texts[key]

    def decode(
        self,
        recorder: Recorder | None,
        params: SamplingParams,
        *,
        prompts: list[list[int]] | None = None,
        controller: FixedController | None = None,
        **limits: Any,
    ) -> Texts:
        """Return the texts of all prompts; raises AssertionError if the drafter failed."""
        with self.watched(recorder):
            engine = self.engine(recorder, controller, **limits)
            outputs = engine.generate(prompts or self.prompts, params)
        return [tuple(output.token_ids) for output in outputs]

    def engine(
        self, recorder: Recorder | None, controller: FixedController | None = None, **limits: Any
    ) -> Engine:
        longest = max(map(len, self.prompts)) + self.max_tokens
        sizes = {"max_batch": len(self.prompts), "max_context": longest} | limits
        nodes = self.k if controller is None else max(self.k, TREE.num_nodes)
        config = EngineConfig(
            num_speculative_tokens=nodes, controller="fixed", sharing="none", **sizes
        )
        return Engine(
            target=self.target,
            tokenizer=self.tokenizer,
            drafter=recorder,
            controller=controller,
            config=config,
        )

    @contextmanager
    def watched(self, recorder: Recorder | None) -> Any:
        """Raise errors for drafter failures, which the engine itself only logs."""
        logger, failures = logging.getLogger("forerun.drafting"), Failures()
        level = logger.level
        logger.addHandler(failures)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(failures)
            logger.setLevel(level)
        problems = [*(recorder.problems if recorder else ()), *failures.messages]
        if problems:
            raise AssertionError(problems[-1])

    def compare(self, name: str, found: Texts, plain: Texts) -> None:
        """Raise an error unless the texts equal those of plain decoding."""
        for index, (ours, expected) in enumerate(zip(found, plain, strict=True)):
            if ours != expected:
                places = range(min(len(ours), len(expected)))
                at = next((p for p in places if ours[p] != expected[p]), len(places))
                raise AssertionError(
                    f"{name}: the text of prompt {index} differs from plain decoding at token "
                    f"{at}: {ours[at : at + 3]} instead of {expected[at : at + 3]}"
                )


def _same_proposal(one: Proposal | None, other: Proposal | None) -> bool:
    """Whether two proposals are equal, with probabilities compared up to rounding."""
    if one is None or other is None:
        return one is other
    if one.tree != other.tree or one.choice is not other.choice:
        return False
    if one.tokens.tolist() != other.tokens.tolist():
        return False
    if one.draft_probs is None or other.draft_probs is None:
        return one.draft_probs is other.draft_probs
    return torch.allclose(one.draft_probs.float(), other.draft_probs.float(), atol=1e-5)


def _log_excess(proposal: Proposal) -> tuple[float, float]:
    """Return by how much the log-probability of the draws exceeds its mean, and its variance."""
    if not proposal.choice.is_drawn or proposal.draft_probs is None:
        return 0.0, 0.0
    tree = proposal.tree
    expanded = sorted(set(tree.parents))
    drawn = [tree.children(parent)[0] for parent in expanded]
    probs = proposal.draft_probs.double().cpu()
    tokens = proposal.tokens.cpu()[torch.tensor(drawn)]
    logs: Tensor = probs.clamp(min=1e-300).log()
    mean = (probs * logs).sum(-1)
    variance = (probs * logs.square()).sum(-1) - mean.square()
    excess = logs.gather(-1, tokens[:, None])[:, 0] - mean
    return float(excess.sum()), float(variance.clamp(min=0).sum())
