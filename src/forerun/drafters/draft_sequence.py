"""The state of one sequence in a draft model, and the choice of its tokens level by level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from forerun.control.base import Plan, Tree
from forerun.drafters.base import ChainDraft, DraftRequest
from forerun.errors import DrafterError
from forerun.models.base import Context, LanguageModel, RowBatch, Span
from forerun.sampling.config import Choice, SamplingParams, draft_params
from forerun.sampling.history import RowHistory
from forerun.sampling.kernels import largest
from forerun.sampling.noise import Purpose, draw, position_key, step_keys, uniform
from forerun.sampling.processors import pack_params, target_probs
from forerun.sampling.proposal import Proposal
from forerun.sampling.walk import target_tokens
from forerun.theory.tree import TokenTree

PREFILL_CHUNK = 256
"""Most pending tokens of a sequence in one pass."""
ONE_NODE = Tree(num_nodes=1, depth=1, width=1)


@dataclass(slots=True, kw_only=True, eq=False)
class DraftSequence:
    """The state that a draft model keeps per request, and the progress of its current chain.

    Attributes:
        context: its committed tokens and their rows in the draft's own KV cache.
        tree_params: of the distributions that a tree's nodes are chosen by.
        stop_reason: what set the budget: "budget" (the plan) or "context" (that of the draft).
        num_fed: draft tokens of a chain that were fed; their rows are staged in the cache.
        tree_shape: the largest tree to draft; a chain is the tree of width 1.
        tree_rows: the draft tokens of a tree that were fed, as paths, in the order of their rows.
        num_tried: nodes on accepted paths of drawn trees that had children, the last committed
            token included, and a few to begin with.
        num_first: how often the first child of these was accepted.
        features: of the target, of rows that an attached head has not read.
        lacks_features: some row's features were not handed over, so that nothing can be drafted.
        kv_verified: a proposal computed from all cached rows has been verified, so these rows may
            be offered to other requests that begin with the same tokens.
    """

    request: DraftRequest
    context: Context
    params: SamplingParams
    tree_params: SamplingParams
    choice: Choice
    budget: int = 0
    stop_reason: str = "budget"
    num_chain: int = 0
    num_fed: int = 0
    tree_shape: Tree = ONE_NODE
    tree_choice: Choice = Choice.DETERMINISTIC
    tree_rows: Mapping[tuple[int, ...], int] = field(default_factory=dict)
    num_tried: float = 8.0
    num_first: float = 0.62 * 8
    features: list[Tensor] = field(default_factory=list)
    lacks_features: bool = False
    kv_verified: bool = True  # rows found in the cache were verified before they were offered

    @classmethod
    def begin(cls, request: DraftRequest, context: Context) -> DraftSequence:
        params = ranking = draft_params(request.params)
        if params.greedy:
            ranking = replace(params, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
        choice = Choice.COUPLED if request.coupled else Choice.SAMPLED
        return cls(
            request=request,
            context=context,
            params=params,
            tree_params=ranking,
            choice=Choice.DETERMINISTIC if params.greedy else choice,
        )

    @property
    def name(self) -> str:
        return self.request.request_id

    @property
    def num_committed(self) -> int:
        return len(self.request.ids)

    def begin_step(self, plan: Plan, max_context: int) -> None:
        """Set this step's budget, cut to the draft's context."""
        shape = plan.shape
        planned = min(shape.num_nodes, shape.depth)
        room = max(0, max_context - len(self.context.ids))
        self.budget = min(planned, room)
        self.stop_reason = "budget" if self.budget == planned else "context"
        self.tree_shape = Tree(num_nodes=max(1, self.budget), depth=max(1, self.budget), width=1)
        self.tree_choice = self.choice
        if isinstance(shape, Tree) and shape.width > 1:
            self.tree_shape = replace(shape, depth=max(1, min(shape.depth, room)))
            self.tree_choice = self._choice_of_tree()

    def _choice_of_tree(self) -> Choice:
        """Return how nodes of a tree are chosen for the verification of the request."""
        if self.params.verification == "walk":
            return Choice.DETERMINISTIC
        return Choice.WITHOUT_REPLACEMENT if self.choice is Choice.SAMPLED else self.choice

    @property
    def branches(self) -> bool:
        return self.tree_shape.width > 1

    def fits_one_call(self, num_tokens: int, max_context: int) -> bool:
        fits = len(self.context.ids) + num_tokens - 1 <= max_context
        return fits and self.request.history is None and not self.params.has_processors

    @property
    def grows_in_one_call(self) -> bool:
        is_shaped = self.request.history is not None or self.tree_params.has_processors
        return self.tree_choice is Choice.DETERMINISTIC and not is_shaped

    def first_span(self) -> Span:
        self.num_chain = self.context.num_pending
        self.num_fed = 0
        self.tree_rows = {}
        return self.context.span(self.num_chain)

    def chain_draft(
        self, model: LanguageModel, features: tuple[int, ...] = ()
    ) -> ChainDraft | None:
        """Return how cycles go on with the chain; None before a long text was read."""
        if self.context.num_pending > PREFILL_CHUNK:
            return None
        return ChainDraft(model, self.context, self.choice, self.params.temperature, features)

    def note_chain(self, num_tokens: int, num_levels: int) -> int:
        """Note a chain that was drafted elsewhere; returns the rows that it staged."""
        self.budget, self.stop_reason = num_tokens, "budget"
        self.num_chain, self.num_fed = self.context.num_pending, num_levels - 1
        self.tree_rows = {}
        return self.num_chain + self.num_fed

    def next_span(self) -> Span:
        span = self.context.span(1, num_staged=self.num_chain + self.num_fed)
        self.num_fed += 1
        return span

    def tree_span(self, tree: TokenTree, rows: Mapping[tuple[int, ...], int]) -> Span:
        self.tree_rows = rows
        return self.context.span(1, tree, num_staged=self.num_chain - 1)

    def commit(self, accepted: Sequence[int]) -> None:
        """Commit the rows of pending and accepted tokens; the last drafts may have none."""
        if not self.tree_rows:
            self.context.commit(range(self.num_chain + min(len(accepted), self.num_fed)))
        else:
            paths = (tuple(accepted[: depth + 1]) for depth in range(len(accepted)))
            rows = [self.num_chain + self.tree_rows[p] for p in paths if p in self.tree_rows]
            self.context.commit([*range(self.num_chain), *rows])
        self.kv_verified = True

    @property
    def first_acceptance(self) -> float:
        return self.num_first / self.num_tried

    def learn(self, proposal: Proposal, path: Sequence[int]) -> None:
        """Count the accepted first children, which shape later trees of drawn tokens."""
        if proposal.choice is Choice.DETERMINISTIC:
            return
        for node, following in zip((-1, *path), (*path, None), strict=True):
            if children := proposal.tree.children(node):
                self.num_tried += 1
                self.num_first += following == children[0]

    @property
    def num_features(self) -> int:
        """Number of rows whose features have not been fed to the head yet."""
        return sum(map(len, self.features))

    def next_features(self, num_rows: int) -> Float[Tensor, "rows layers width"]:
        if num_rows > self.num_features:
            raise DrafterError(
                f"request {self.name} has features of {self.num_features} rows where {num_rows} "
                "are to be read"
            )
        if len(self.features) > 1:
            self.features = [torch.cat(self.features)]
        return self.features[0][:num_rows]

    def keep_rows(self, num_rows: int) -> None:
        """Commit the next `num_rows` rows, computed from features, and drop all rows after them."""
        if num_rows:
            self.context.commit(range(num_rows))
            self.features = [self.next_features(self.num_features)[num_rows:]]
        self.num_chain = 0

    def close(self) -> None:
        """Free the KV slot; its verified rows may be reused by other requests."""
        self.context.close(self.context.num_cached if self.kv_verified else 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Levels:
    """The tokens of all chains drafted in one call, and their draft distributions.

    Attributes:
        draft_probs: the rows they were drawn from, likewise; None where all chains are
            deterministic.
    """

    tokens: Int64[Tensor, "levels sequences"]
    draft_probs: Float[Tensor, "levels sequences vocab"] | None


def draft_levels(
    model: LanguageModel, sequences: Sequence[DraftSequence], batch: RowBatch, vocab_size: int
) -> Levels:
    """Draft every sequence to its budget."""
    num_levels, device = sequences[0].budget, model.device
    chooser = Chooser(sequences, num_levels, device)
    params = pack_params([sequence.params for sequence in sequences], device)
    draft_probs = None
    if any(sequence.choice is not Choice.DETERMINISTIC for sequence in sequences):
        draft_probs = torch.empty(num_levels, len(sequences), vocab_size, device=device)
    positions = batch.positions.index_select(0, batch.logit_rows)
    drafted: list[Tensor] = []
    for level in range(num_levels):
        if level > 0:
            sequences = [sequence for sequence in sequences if sequence.budget > level]
            positions = positions[: len(sequences)] + 1
            batch = next_pass(sequences, drafted[-1][: len(sequences)], positions)
        logits = fit_vocabulary(model.forward(batch).logits, vocab_size)
        probs = target_probs(
            logits,
            params.rows(slice(len(sequences))),
            row_histories(sequences, drafted),
            out=None if draft_probs is None else draft_probs[level, : len(sequences)],
        )
        drafted.append(chooser.choose(probs, level))
    return Levels(
        tokens=torch.nn.utils.rnn.pad_sequence(drafted, batch_first=True),
        draft_probs=draft_probs,
    )


def draft_keys(
    sequences: Sequence[DraftSequence], num_levels: int
) -> Int64[Tensor, "levels sequences"]:
    """Return the noise keys of sampled draft tokens.

    By committed length and node: a rejected position is drawn afresh next step.
    """
    levels = range(num_levels)
    keys = [
        step_keys(s.request.noise_key, s.num_committed, levels, Purpose.DRAFT) for s in sequences
    ]
    return torch.tensor(keys, dtype=torch.int64).t()


def race_keys(
    sequences: Sequence[DraftSequence], num_levels: int
) -> Int64[Tensor, "levels sequences"]:
    """Return the noise keys of coupled draft tokens, which equal those of the target's draws."""
    keys = [
        [position_key(b.request.noise_key, b.num_committed + level) for b in sequences]
        for level in range(num_levels)
    ]
    return torch.tensor(keys, dtype=torch.int64)


def next_pass(sequences: Sequence[DraftSequence], tokens: Tensor, positions: Tensor) -> RowBatch:
    return RowBatch(
        tokens=tokens,
        positions=positions,
        spans=tuple(sequence.next_span() for sequence in sequences),
        logit_rows=torch.arange(len(sequences), device=tokens.device),
    )


class Chooser:
    """Chooses the next tokens of a level: the likeliest ones or draws, by request."""

    def __init__(
        self, sequences: Sequence[DraftSequence], num_levels: int, device: torch.device
    ) -> None:
        self.choices = [sequence.choice for sequence in sequences]
        self.kinds = set(self.choices)
        if Choice.SAMPLED in self.kinds:
            self.uniforms = uniform(draft_keys(sequences, num_levels).to(device))
        if Choice.COUPLED in self.kinds:
            self.positions = race_keys(sequences, num_levels).to(device)

    def choose(
        self, probs: Float[Tensor, "sequences vocab"], level: int
    ) -> Int64[Tensor, " sequences"]:
        if len(self.kinds) == 1:
            return self._choose(self.choices[0], probs, level, slice(len(probs)))
        tokens = torch.empty(len(probs), dtype=torch.int64, device=probs.device)
        for choice in self.kinds:
            rows = [row for row in range(len(probs)) if self.choices[row] is choice]
            tokens[rows] = self._choose(choice, probs[rows], level, rows)
        return tokens

    def _choose(self, choice: Choice, probs: Tensor, level: int, rows: slice | list[int]) -> Tensor:
        if choice is Choice.DETERMINISTIC:
            return largest(probs)[1]
        if choice is Choice.SAMPLED:
            return draw(probs, self.uniforms[level, rows])
        return target_tokens(probs, self.positions[level, rows])


def row_histories(
    sequences: Sequence[DraftSequence], drafted: Sequence[Tensor]
) -> list[RowHistory | None]:
    """Return the token histories that penalties read for each row; this waits for the device."""
    if all(sequence.request.history is None for sequence in sequences):
        return []
    levels: list[list[int]] = [tokens.tolist() for tokens in drafted]
    return [
        history.at([tokens[row] for tokens in levels])
        if (history := sequence.request.history) is not None
        else None
        for row, sequence in enumerate(sequences)
    ]


def fit_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Return draft logits over the target's token ids; ids the draft lacks become impossible."""
    missing = vocab_size - logits.shape[-1]
    if missing == 0:
        return logits
    if missing < 0:
        return logits[:, :vocab_size]
    return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
