"""Drafting with a smaller language model, or with the target's own first layers.

A step costs one pass over the committed tokens that the draft has not read, then K - 1 passes of
one row per sequence; for trees, one pass per further level. Each pass reads the draft's weights
once and computes batch x vocabulary logits. Where only the temperature shapes the distributions,
the model may draft all chains, or all trees of most probable paths, in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from forerun.control.base import Plan
from forerun.drafters.base import ChainDraft, Drafter, DraftRequest, StepOutcome
from forerun.drafters.draft_sequence import (
    PREFILL_CHUNK,
    DraftSequence,
    Levels,
    draft_keys,
    draft_levels,
    race_keys,
)
from forerun.drafters.tree_growth import (
    MAX_WIDTH,
    BuiltTree,
    draft_trees,
    invalid_probs,
    token_paths,
)
from forerun.errors import DrafterError, InvalidRequest
from forerun.models.architecture import QUANTISED
from forerun.models.base import (
    Context,
    LanguageModel,
    LikelyTree,
    RowBatch,
    Span,
    pack,
)
from forerun.sampling.config import Choice
from forerun.sampling.processors import failed_rows
from forerun.sampling.proposal import Assurance, Proposal
from forerun.theory.tree import TokenTree

MAX_DIGITS = 12
"""Most digits of a number after a colon."""


class DraftModel(Drafter):
    """Drafts chains and trees with a causal language model that shares the target's token ids."""

    method = "draft_model"
    max_width = MAX_WIDTH
    reads_text = True
    drafts_in_cycles = True
    model: LanguageModel

    def __init__(self, model: LanguageModel, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._sequences: dict[str, DraftSequence] = {}
        self.model = model

    @torch.inference_mode()
    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | None]:
        """Draft up to K tokens per request, one pass per level for the whole batch."""
        drafting = []
        for request, plan in zip(requests, plans, strict=True):
            sequence = self._sequence(request)
            sequence.begin_step(plan, self.model.max_context)
            if sequence.budget > 0:
                drafting.append(sequence)
        if not drafting:
            return [None] * len(requests)
        if self.model.vocab_size < self.vocab_size:
            check_ids(drafting, self.model.vocab_size)
        chains, trees = divided(drafting)
        proposals: dict[str, Proposal] = {}
        for group, draft in ((chains, self._draft), (trees, self._draft_trees)):
            if group:
                names = [sequence.name for sequence in group]
                proposals |= zip(names, draft(group), strict=True)
        return [proposals.get(request.request_id) for request in requests]

    def chain_draft(self, request_id: str, plan: Plan) -> ChainDraft | None:
        sequence, model = self._sequences.get(request_id), self.model
        if sequence is None or not self._is_cyclic() or model.vocab_size < self.vocab_size:
            return None
        return sequence.chain_draft(model, self.required_features)

    def _is_cyclic(self) -> bool:
        """Whether cycles of the target draft as this class does; a subclass may draft otherwise."""
        return self.model.in_kernels and vars(type(self)).get("drafts_in_cycles", False)

    def note_chain(self, request_id: str, plan: Plan, tokens: Tensor, num_levels: int) -> Proposal:
        """Note a chain of K tokens that the kernels drafted, with `num_levels` passes."""
        sequence = self._sequences[request_id]
        num_rows = sequence.note_chain(plan.shape.num_nodes, num_levels)
        context = sequence.context
        context.store.claim(context.slot, context.num_cached, num_rows)
        return Proposal(
            tokens=tokens, tree=TokenTree.chain(sequence.budget), choice=sequence.choice
        )

    def _sequence(self, request: DraftRequest) -> DraftSequence:
        sequence = self._sequences.get(request.request_id)
        if sequence is None:
            sequence = DraftSequence.begin(request, self._open(request))
            self._sequences[request.request_id] = sequence
        return sequence

    def _open(self, request: DraftRequest) -> Context:
        return Context(self.model.store, request.ids, request.scope)

    def _draft(self, sequences: Sequence[DraftSequence]) -> list[Proposal]:
        """Return proposals of sequences that have a budget, sorted by descending budget."""
        self._prefill(sequences)
        depth = sequences[0].budget
        batch = self._batch([sequence.first_span() for sequence in sequences], sequences)
        if all(s.fits_one_call(depth, self.model.max_context) for s in sequences):
            choices = {sequence.choice for sequence in sequences}
            if choices == {Choice.DETERMINISTIC}:
                chains = self.model.greedy_chain(batch, depth, self.vocab_size).unbind()
                _note_fed_rows(sequences, depth)
                return [
                    _greedy_proposal(s, chain) for s, chain in zip(sequences, chains, strict=True)
                ]
            if self.model.drafts_in_one_call and not {Choice.SAMPLED, Choice.COUPLED} <= choices:
                levels = self._sampled_chains(sequences, batch, depth, Choice.COUPLED in choices)
                _note_fed_rows(sequences, depth)
                return _proposals_of(sequences, levels)
        return _proposals_of(sequences, draft_levels(self.model, sequences, batch, self.vocab_size))

    def _draft_trees(self, sequences: Sequence[DraftSequence]) -> list[Proposal]:
        """Draft trees for a whole batch; plans for chains share the passes of the trees."""
        self._prefill(sequences)
        batch = self._batch([sequence.first_span() for sequence in sequences], sequences)
        if self.model.drafts_in_one_call and all(s.grows_in_one_call for s in sequences):
            shapes = [
                (s.tree_shape.num_nodes, s.tree_shape.depth, s.tree_shape.width) for s in sequences
            ]
            temperatures = [sequence.tree_params.temperature for sequence in sequences]
            trees = self.model.likely_trees(batch, shapes, temperatures, self.vocab_size)
            return [_tree_proposal(s, tree) for s, tree in zip(sequences, trees, strict=True)]
        return draft_trees(self.model, sequences, batch, self.vocab_size)

    def _sampled_chains(
        self, sequences: Sequence[DraftSequence], batch: RowBatch, depth: int, by_race: bool
    ) -> Levels:
        temperatures = torch.tensor([s.params.temperature for s in sequences], dtype=torch.float32)
        keys = race_keys(sequences, depth) if by_race else draft_keys(sequences, depth)
        device = self.model.device
        drawn = self.model.sampled_chain(
            batch,
            keys.to(device),
            temperatures.to(device),
            self.vocab_size,
            by_race=by_race,
        )
        greedy = all(sequence.choice is Choice.DETERMINISTIC for sequence in sequences)
        return Levels(
            tokens=drawn.tokens,
            draft_probs=None if greedy else drawn.probs,
        )

    def _batch(self, spans: Sequence[Span], sequences: Sequence[DraftSequence]) -> RowBatch:
        """Return a pass over pending tokens that computes logits of each sequence's last row."""
        ids = [
            token
            for sequence, span in zip(sequences, spans, strict=True)
            for token in sequence.context.pending(span.num_chain)
        ]
        ends = accumulate(span.num_chain for span in spans)
        return pack(spans, ids, [end - 1 for end in ends], self.model.device)

    def _prefill(self, sequences: Sequence[DraftSequence]) -> None:
        """Feed long pending prefixes in chunks until the rest fits one pass."""
        while long := [s for s in sequences if s.context.num_pending > PREFILL_CHUNK]:
            batch = self._batch([s.context.span(PREFILL_CHUNK) for s in long], long)
            self.model.forward(replace(batch, logit_rows=batch.logit_rows[:0]))
            for sequence in long:
                sequence.context.commit(range(PREFILL_CHUNK))
                sequence.kv_verified = False

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Commit the KV rows of accepted tokens; other tokens are fed before the next draft."""
        for outcome in outcomes:
            sequence, verdict = self._sequences.get(outcome.request_id), outcome.verdict
            if sequence is not None and verdict is not None and outcome.proposal is not None:
                sequence.commit(verdict.tokens[: verdict.num_accepted])
                sequence.learn(outcome.proposal, verdict.path)

    def forget(self, request_id: str) -> None:
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            sequence.close()


def divided(sequences: Sequence[DraftSequence]) -> tuple[list[DraftSequence], list[DraftSequence]]:
    """Return the sequences drafted as chains, sorted by descending budget, and those with trees.

    Beside a tree a chain is drafted in the same passes, unless it shares the target's noise.
    """
    trees = [sequence for sequence in sequences if sequence.branches]
    chains: list[DraftSequence] = []
    for sequence in sequences:
        if not sequence.branches:
            apart = sequence.choice is Choice.COUPLED
            (chains if apart or not trees else trees).append(sequence)
    return sorted(chains, key=lambda sequence: -sequence.budget), trees


def check_ids(sequences: Sequence[DraftSequence], vocab_size: int) -> None:
    """Refuse pending tokens that only the target has, such as the padding of its vocabulary."""
    for sequence in sequences:
        highest = max(sequence.context.pending(), default=0)
        if highest >= vocab_size:
            raise DrafterError(
                f"request {sequence.name} holds token {highest}, but the draft has only "
                f"{vocab_size} tokens and cannot read it"
            )


def _note_fed_rows(sequences: Sequence[DraftSequence], depth: int) -> None:
    for sequence in sequences:
        sequence.num_fed = depth - 1


def _greedy_proposal(sequence: DraftSequence, chain: Tensor) -> Proposal:
    """Return a chain of most likely tokens, cut to the budget."""
    tokens = chain[: sequence.budget] if sequence.budget < chain.shape[0] else chain
    return Proposal(
        tokens=tokens,
        tree=TokenTree.chain(sequence.budget),
        choice=Choice.DETERMINISTIC,
        stop_reason=sequence.stop_reason,
        assurance=Assurance(tokens=tokens, draft_probs=None),
    )


def _tree_proposal(sequence: DraftSequence, found: LikelyTree) -> Proposal:
    """Return a tree of most probable paths, and note which of its nodes were fed."""
    paths = token_paths(found.tree, found.tokens)
    sequence.tree_rows = {p: row for p, row in zip(paths, found.rows, strict=True) if row >= 0}
    if not paths:
        raise invalid_probs(sequence)
    built = BuiltTree(
        tree=found.tree, tokens=found.tokens, log_probs=found.log_probs, paths=tuple(paths)
    )
    return built.proposal(sequence.stop_reason, is_assured=True)


def _proposals_of(sequences: Sequence[DraftSequence], levels: Levels) -> list[Proposal]:
    """Return the finished chains, each up to the first distribution that contains NaN.

    Where the draft fails may depend on the tokens it drew before. To drop the whole chain would
    then depend on drawn tokens and bias the text; to end the chain there does not. A failure at the
    first node depends on committed tokens alone and is left for the engine to refuse.
    """
    if levels.draft_probs is None:
        chains = levels.tokens.t().unbind()
        return [_greedy_proposal(s, chain) for s, chain in zip(sequences, chains, strict=True)]
    failed = [*zip(*failed_rows(levels.draft_probs).tolist(), strict=True)]
    return [
        _sampled_proposal(sequence, levels, index, failed[index])
        for index, sequence in enumerate(sequences)
    ]


def _sampled_proposal(
    sequence: DraftSequence, levels: Levels, index: int, failed: Sequence[bool]
) -> Proposal:
    """Return a chain with its draft distributions, which a greedily chosen chain does not have."""
    assert levels.draft_probs is not None
    tokens = levels.tokens[: sequence.budget, index]
    if sequence.choice is Choice.DETERMINISTIC:
        return _greedy_proposal(sequence, tokens)
    num_valid = next((n for n in range(sequence.budget) if failed[n]), sequence.budget)
    length = max(1, num_valid)
    tokens, draft_probs = tokens[:length], levels.draft_probs[:length, index]
    return Proposal(
        tokens=tokens,
        tree=TokenTree.chain(length),
        choice=sequence.choice,
        draft_probs=draft_probs,
        stop_reason=sequence.stop_reason if length == sequence.budget else "invalid_probs",
        assurance=Assurance(tokens=tokens, draft_probs=draft_probs) if num_valid else None,
    )


class SelfDraft(DraftModel):
    """A draft of the target's own weights, untrained: its first layers, or all of it in fewer bits.

    It shares the target's KV cache, so the rows of committed tokens are there already: a layer's
    rows do not depend on the layers above it, and those of the target are the ones that its
    quantised copy approximates. Draft rows are staged in the target's own slot, and the target's
    next pass overwrites them.

    Args:
        method: its name in plans, traces and metrics, as in `--draft`: "self:int4" or "self:2".
    """

    reads_text = False
    drafts_in_cycles = True

    def __init__(self, model: LanguageModel, vocab_size: int, method: str = "self") -> None:
        super().__init__(model, vocab_size)
        self.method = method

    def _open(self, request: DraftRequest) -> Context:
        assert request.context is not None
        return TargetKVView(request.context)

    def forget(self, request_id: str) -> None:
        """Drop the state of a request; its slot belongs to the target."""
        self._sequences.pop(request_id, None)


class TargetKVView(Context):
    """The target's KV of a sequence, in which a drafter may stage rows but not commit them."""

    def __init__(self, target: Context) -> None:
        self.store = target.store
        self.ids = target.ids
        self.slot = target.slot

    def commit(self, rows: Sequence[int]) -> None:
        """Do nothing: the target commits its own rows, and the draft's are the same rows."""


def build_self_draft(argument: str, target: LanguageModel) -> SelfDraft:
    """Build `self:N`, the target's first N layers, or `self:int4`, all of it in fewer bits."""
    name = f"self:{argument}"
    weights = next((weights for weights in QUANTISED if weights == argument), None)
    if weights is not None:
        model, missing = target.in_fewer_bits(weights), "the native runner, to quantise its weights"
    else:
        model, missing = (
            target.first_layers(int(argument)),
            "a runner that can run its first layers alone",
        )
    if model is None:
        raise InvalidRequest(
            f"{name} needs {missing}; {type(target).__name__} cannot: choose another runner or "
            "another draft"
        )
    return SelfDraft(model, target.vocab_size, name)


def check_self_draft(argument: str, num_target_layers: int) -> None:
    """Refuse an argument of `self` that is no weight format and no number of layers."""
    if argument in QUANTISED:
        return
    name = f"self:{argument:.40}"
    if not (argument.isascii() and argument.isdigit()) or len(argument) > MAX_DIGITS:
        raise InvalidRequest(
            f"there is no draft {name}; give {', '.join(f'self:{w}' for w in QUANTISED)} "
            "for all of the target in fewer bits, or self:N for its first N layers"
        )
    number = int(argument)
    if not 0 < number < num_target_layers:
        raise InvalidRequest(
            f"{name} drafts with {number} of the target's {num_target_layers} layers; give a "
            f"number from 1 to {num_target_layers - 1}, as in self:{max(1, num_target_layers // 4)}"
        )
