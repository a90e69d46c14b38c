"""The contract of a drafter: requests and plans in, token trees out, outcomes of steps back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from forerun.control.base import Plan
from forerun.errors import IncompatibleDraft
from forerun.models.base import Context, LanguageModel
from forerun.sampling.config import Choice, SamplingParams
from forerun.sampling.history import History
from forerun.sampling.proposal import Proposal, Verdict

FAILURES = (Exception, SystemExit)
"""Exceptions of drafters that are handled; SystemExit, because a library may try to exit."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftRequest:
    """One sequence that a drafter proposes tokens for; the same object in every step.

    Attributes:
        request_id: key of the drafter's own state for this sequence.
        ids: committed prompt and output tokens. The list grows; a drafter must not change it.
        num_prompt: how many of them belong to the prompt.
        params: the request's sampling parameters.
        noise_key: key of (seed, sample index), see `forerun.sampling.noise`.
        history: token counts of prompt and output where penalties need them (read only).
        coupled: the draft must be drawn with the target's position-keyed noise.
        scope: requests of the same scope may use what was computed from each other's tokens; None
            allows no sharing.
        context: the target's view of the sequence, for drafters that work in the target's own KV.
            They may stage rows there and nothing else.
    """

    request_id: str
    ids: list[int]
    num_prompt: int
    params: SamplingParams
    noise_key: int
    history: History | None
    coupled: bool
    scope: str | None = None
    context: Context | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Returned by a drafter that proposes nothing until `num_tokens` more are committed."""

    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepOutcome:
    """The result of one step for one request: verdict, committed rows and features.

    The target's cache grew by rows `first_row` to `first_row + num_rows`, which belong to
    the tokens at these places of `request.ids`. The last emitted token has no row yet.

    Attributes:
        first_row: index of the first of these rows; 0 in the first outcome of a sequence, also
            where the first rows were found in the cache.
        num_rows: rows that the step added: pending tokens that were fed, then the accepted path. In
            the first outcome they include the rows that were found in the cache.
        verdict: None while a prompt is being read.
        proposal: the draft that was verified; None for plain steps and while a prompt is read.
        features: of the rows, in order, one entry per layer of `Drafter.required_features`; None
            where these are empty.
        top_tokens: for drafters with `required_top_k`, the target's most likely tokens (of its raw
            logits, most likely first) after each token whose row was verified, rejected nodes
            included; of a token fed at several rows the last row counts.
    """

    request: DraftRequest
    first_row: int
    num_rows: int
    verdict: Verdict | None = None
    proposal: Proposal | None = None
    features: Float[Tensor, "rows layers width"] | None = None
    top_tokens: Mapping[int, list[int]] = field(default_factory=dict)

    @property
    def request_id(self) -> str:
        """Key under which a drafter stores its state for this sequence."""
        return self.request.request_id


class ChainDraft(NamedTuple):
    """How a model continues a request's chain within cycles of the target.

    Attributes:
        context: the request's tokens in the model's store.
        temperature: of the distributions that tokens are drawn from; 0 where they are not.
        features: layers of the target that the model reads.
    """

    model: LanguageModel
    context: Context
    choice: Choice
    temperature: float
    features: tuple[int, ...] = ()


def check_made_for(what: str, made_for: tuple[int, int], target: LanguageModel) -> None:
    """Refuse a head, named by `what`, that was made for another hidden size or vocabulary.

    Raises IncompatibleDraft.
    """
    given = (target.hidden_size, target.vocab_size)
    for name, wanted, found in zip(("hidden size", "vocabulary"), made_for, given, strict=True):
        if wanted != found:
            raise IncompatibleDraft(
                f"{what} made for a target with {name} {wanted}, this target has {found}: use a "
                "head that was trained for this target"
            )


class Drafter(ABC):
    """Proposes token trees. Its state is stored per request_id and dropped by `forget`.

    `forerun.testing.conformance.check_drafter` tests an implementation against this contract.

    Attributes:
        method: the name that plans and traces use for this drafter.
        required_features: layers of the target whose input the drafter reads; empty for most. Layer
            0 stands for the embeddings, the number of layers for what leaves the last one, before
            the final norm.
        required_top_k: number of the target's most likely tokens per verified row that are needed
            in `StepOutcome.top_tokens`.
        max_width: the most children per node that are proposed; controllers plan trees only for
            drafters that have more than 1.
        max_k: the largest K that it can draft; None: any.
        reads_text: whether the whole text of a request is processed before its first draft.
        model: the language model that continues the target's token ids; None without one.
    """

    method: str
    model: LanguageModel | None = None
    required_features: tuple[int, ...] = ()
    required_top_k: int = 0
    max_width: int = 1
    max_k: int | None = None
    reads_text: bool = False

    @abstractmethod
    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> Sequence[Proposal | Pause | None]:
        """Return one proposal per request within the shape of its plan, or None for plain decoding.

        Whether a sampled node is proposed must not depend on the token that was drawn for it: to
        raise, to return None or to prune because of a drawn token biases the text. Where drafting
        cannot go on, return the part that was drafted.
        """

    def chain_draft(self, request_id: str, plan: Plan) -> ChainDraft | None:
        """Return how the target's cycles draft a request's next chains in one call.

        None where they cannot, so that `propose` is called at every step.
        """
        return None

    def note_chain(self, request_id: str, plan: Plan, tokens: Tensor, num_levels: int) -> Proposal:
        """Return the proposal of a chain that a cycle drafted, with `num_levels` passes.

        It is called for requests with a `chain_draft`, in place of `propose`.
        """
        raise NotImplementedError

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:  # noqa: B027 (most need nothing)
        """Receive the rows that every step committed, in order, after the tokens are committed.

        Prompts that are being read and drafted steps are reported as they happen, plain steps as
        one outcome without a verdict before the next draft (as they happen to a drafter with
        `required_top_k`). The last step of a sequence is followed by `forget` instead.
        """

    def forget(self, request_id: str) -> None:  # noqa: B027 (some have no state)
        """Drop the state of a request; unknown ids are ignored."""

    def by_method(self) -> Mapping[str, Drafter]:
        """Return the drafters that plans can name: this one, or those that it stands for."""
        return {self.method: self}

    def level_cost(self, target: LanguageModel) -> float | None:
        """Return the bytes that drafting a level reads as a share of the target's, if known."""
        own = None if self.model is None else self.model.bytes_read
        return None if own is None or target.bytes_read is None else own / target.bytes_read
