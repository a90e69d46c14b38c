"""Calls the drafter; sequences for which it fails are decoded without a draft.

A batch that fails is repeated request by request. A request that fails again is decoded plainly
from then on, and the log says why once.

Proposals are checked, because a verifier trusts `draft_probs`: rows that the tokens were not drawn
from bias the text unnoticed. Not every mistake of a drafter can be found, but those that can be are
refused before the target pass that all requests share. Values are read for the whole step at once,
which waits for the device once; those that a drafter vouches for (`Assurance`) are read only where
that is free.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from forerun.control.base import Tree
from forerun.drafters.base import (
    FAILURES,
    ChainDraft,
    Drafter,
    DraftRequest,
    Pause,
    StepOutcome,
)
from forerun.engine.scheduler import ScheduledSequence
from forerun.engine.sequence import Sequence
from forerun.errors import DrafterError
from forerun.models.base import CycleBatch, CycleMember
from forerun.sampling.config import Choice, resolve_verification
from forerun.sampling.proposal import Proposal
from forerun.theory.tree import TokenTree, expanded

logger = logging.getLogger("forerun.drafting")

MASS_TOLERANCE = 1e-4
"""Bounds the bias of rows that are off by a factor: fp32 softmax is far below, bf16 (0.4%) not."""


class GuardedDrafter:
    """Wraps a drafter so that its failures lead to plain decoding.

    The drafter sees every row that the target's cache holds of a request, in order, before it is
    asked to continue it: also after a failure made it drop its state.

    Attributes:
        required_top_k: that of the drafter; 0 for most.
    """

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self.drafter = drafter
        self.vocab_size = vocab_size
        self.required_top_k = drafter.required_top_k
        self.is_several = len(drafter.by_method()) > 1

    def propose(self, entries: Seq[ScheduledSequence]) -> None:
        """Give every entry a checked proposal, or none if its sequence is decoded plainly."""
        wanted = [entry for entry in entries if not entry.sequence.draft.failed]
        if not wanted:
            return
        try:
            self._propose(wanted)
        except FAILURES as error:  # a failure of the drafter must leave the text intact
            logger.info("drafter failed on a batch of %d, retrying singly: %s", len(wanted), error)
            for entry in wanted:
                self._propose_singly(entry)

    def chain_draft(self, entry: ScheduledSequence) -> ChainDraft | None:
        """Return how cycles of the target draft the chain of an entry; None if they cannot.

        Of several drafters, the others have to observe the plain steps before first.
        """
        sequence = entry.sequence
        is_behind = self.is_several and sequence.draft.num_observed < entry.num_cached
        if sequence.draft.failed or is_behind or isinstance(entry.plan.shape, Tree):
            return None
        try:
            return self.drafter.chain_draft(sequence.key, entry.plan)
        except FAILURES as error:
            self._give_up(sequence, error)
            return None

    def note_chain(self, entry: ScheduledSequence, tokens: Tensor, num_levels: int) -> None:
        """Give an entry a chain that the target's cycles drafted; see `Drafter.note_chain`."""
        sequence = entry.sequence
        sequence.draft.num_observed = entry.num_cached
        entry.draft(self.drafter.note_chain(sequence.key, entry.plan, tokens, num_levels))

    def _propose_singly(self, entry: ScheduledSequence) -> None:
        self.forget(entry.sequence)  # the failed attempt may have left half a state
        try:
            self._propose([entry])
        except FAILURES as error:
            self._give_up(entry.sequence, error)

    def _propose(self, entries: Seq[ScheduledSequence]) -> None:
        unseen = [e for e in entries if e.sequence.draft.num_observed < e.num_cached]
        if unseen:
            self.drafter.observe([self._outcome(entry, entry.num_cached) for entry in unseen])
        requests = [request_of(entry.sequence) for entry in entries]
        answers = self.drafter.propose(requests, [entry.plan for entry in entries])
        if len(answers) != len(entries):
            raise DrafterError(f"{len(answers)} proposals for {len(entries)} requests")
        proposals = [None if isinstance(answer, Pause) else answer for answer in answers]
        check_proposals(entries, proposals, self.vocab_size)
        for entry, proposal, answer in zip(entries, proposals, answers, strict=True):
            entry.draft(proposal)
            if isinstance(answer, Pause):
                sequence = entry.sequence
                sequence.draft.paused_until = len(sequence.ids) + answer.num_tokens

    def _give_up(self, sequence: Sequence, error: BaseException) -> None:
        sequence.draft.failed = True
        self.forget(sequence)
        logger.warning("request %s decodes plainly: drafter failed: %s", sequence.key, error)

    def observe(self, entries: Seq[ScheduledSequence]) -> None:
        """Report a step to the drafter; if that fails for a request, its draft state is dropped.

        Plain steps are reported together before the next draft: a drafter that is not used takes no
        time. One that learns from the target's top tokens, which are not kept, sees every step.

        An outcome cannot be reported twice. So the requests of a failing batch are forgotten and
        reported singly from the next step on; the one that fails once more is decoded plainly.
        """
        together: list[ScheduledSequence] = []
        for entry in entries:
            draft = entry.sequence.draft
            if draft.failed or (self.required_top_k == 0 and entry.decodes_plainly):
                continue
            if draft.observe_failed:
                self._observe([entry])
            else:
                together.append(entry)
        if together:
            self._observe(together)

    def _observe(self, entries: Seq[ScheduledSequence]) -> None:
        try:
            self.drafter.observe(
                [self._outcome(entry, entry.context.num_cached) for entry in entries]
            )
        except FAILURES as error:
            logger.info("drafter failed to observe a batch of %d: %s", len(entries), error)
            for entry in entries:
                if entry.sequence.draft.observe_failed:
                    self._give_up(entry.sequence, error)
                else:
                    entry.sequence.draft.observe_failed = True
                    self.forget(entry.sequence)

    def _outcome(self, entry: ScheduledSequence, num_cached: int) -> StepOutcome:
        """Return the rows up to `num_cached` that are not reported yet, with the step's verdict."""
        draft, context = entry.sequence.draft, entry.context
        start, draft.num_observed = draft.num_observed, num_cached
        features = None
        if self.drafter.required_features:
            features = context.store.features(context.slot, start, num_cached)
        return StepOutcome(
            request=request_of(entry.sequence),
            first_row=start,
            num_rows=num_cached - start,
            verdict=entry.verdict,
            proposal=entry.proposal if entry.verdict is not None else None,
            features=features,
            top_tokens=entry.top_tokens,
        )

    def forget(self, sequence: Sequence) -> None:
        """Drop the drafter's state of a sequence that is finished, aborted or preempted."""
        sequence.draft.request = None
        sequence.draft.num_observed = 0
        try:
            self.drafter.forget(sequence.key)
        except FAILURES as error:
            logger.warning("drafter failed to forget request %s: %s", sequence.key, error)


def cycle_batch(
    entries: Seq[ScheduledSequence], drafter: GuardedDrafter | None, kept: tuple[int, ...]
) -> CycleBatch | None:
    """Return a batch for cycles of the target; None if a sequence needs steps of Python.

    Args:
        kept: layers whose input the target's store keeps.
    """
    members: list[CycleMember] = []
    drafts: list[ChainDraft] = []
    for entry in entries:
        draft = None
        if entry.plan.num_speculative_tokens:
            draft = None if drafter is None else drafter.chain_draft(entry)
            # Of several drafters, others may read features of further layers.
            is_ready = draft is not None and draft.model.in_kernels
            if draft is None or not is_ready or draft.features not in ((), kept):
                return None
            drafts.append(draft)
        if (member := entry.member(draft)) is None:
            return None
        members.append(member)
    if not drafts:
        return CycleBatch(members=members)
    choices = {draft.choice for draft in drafts}
    if {Choice.SAMPLED, Choice.COUPLED} <= choices or len({d.model for d in drafts}) > 1:
        return None
    return CycleBatch(
        members=members,
        draft=drafts[0].model,
        is_drawn=choices != {Choice.DETERMINISTIC},
        by_race=Choice.COUPLED in choices,
    )


def request_of(sequence: Sequence) -> DraftRequest:
    """Return the drafter's view of a sequence, which is the same object at every step."""
    request = sequence.draft.request
    if request is None:
        params = sequence.params
        request = sequence.draft.request = DraftRequest(
            request_id=sequence.key,
            ids=sequence.ids,
            num_prompt=sequence.num_prompt,
            params=params,
            noise_key=sequence.noise_key,
            history=sequence.history,
            coupled=resolve_verification(params, Choice.SAMPLED) == "coupled",
            scope=sequence.scope,
            context=sequence.context,
        )
    return request


def check_proposals(
    entries: Seq[ScheduledSequence], proposals: Seq[Proposal | None], vocab_size: int
) -> None:
    """Refuse proposals that cannot be verified, or cannot be verified exactly."""
    filled: list[Proposal] = []
    for entry, proposal in zip(entries, proposals, strict=True):
        if proposal is not None:
            _check_structure(entry, proposal, vocab_size)
            if proposal.num_drafted:
                filled.append(proposal)
    check_ids([p.tokens for p in filled if p.tokens.is_cpu or not p.is_assured], vocab_size)
    _check_probs([p for p in filled if p.draft_probs is not None and not p.is_assured])


def _check_structure(entry: ScheduledSequence, proposal: Proposal, vocab_size: int) -> None:
    """Check plan, shapes and dtypes of a proposal, but not its values."""
    num_nodes, most = proposal.num_drafted, entry.plan.num_speculative_tokens
    if num_nodes > most:
        raise DrafterError(f"{num_nodes} nodes, but K is {most}")
    if isinstance(entry.plan.shape, Tree):
        _check_tree(entry.plan.shape, proposal.tree)
    if proposal.tokens.shape != (num_nodes,) or proposal.tokens.dtype != torch.int64:
        raise DrafterError(
            f"{num_nodes} nodes, but tokens of shape {tuple(proposal.tokens.shape)} and dtype "
            f"{proposal.tokens.dtype}; there must be one int64 id per node"
        )
    if proposal.draft_probs is not None:
        _check_shape(proposal, proposal.draft_probs, vocab_size)
    if num_nodes == 0:
        return
    resolve_verification(entry.sequence.params, proposal.choice, is_chain=proposal.tree.is_chain)
    if proposal.draft_probs is None and proposal.choice.is_drawn:
        raise DrafterError("a sampled proposal needs the draft_probs it was drawn from")


def _check_tree(shape: Tree, tree: TokenTree) -> None:
    """Refuse a tree that is deeper or wider than planned."""
    depth, width = max(tree.depths, default=0), tree.width
    if depth > shape.depth or width > shape.width:
        raise DrafterError(
            f"a tree of depth {depth} and width {width}, but the plan allows depth {shape.depth} "
            f"and width {shape.width}"
        )


def _check_shape(proposal: Proposal, draft_probs: Tensor, vocab_size: int) -> None:
    """Refuse draft_probs without one row per expanded parent over the target's vocabulary."""
    num_rows = len(set(proposal.tree.parents))
    if draft_probs.shape != (num_rows, vocab_size):
        raise DrafterError(
            f"draft_probs of shape {tuple(draft_probs.shape)}; {num_rows} expanded parents and "
            f"{vocab_size} tokens need ({num_rows}, {vocab_size})"
        )


def check_ids(tokens: Seq[Tensor], vocab_size: int) -> None:
    """Refuse token ids outside the target's vocabulary."""
    if not tokens:
        return
    together = tokens[0] if len(tokens) == 1 else torch.cat([*tokens])
    ids: list[int] = together.tolist()
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        raise DrafterError(f"token id {low if low < 0 else high} is outside 0..{vocab_size - 1}")


def _check_probs(proposals: Seq[Proposal]) -> None:
    """Refuse draft_probs that are not distributions, or give a drawn token probability 0."""
    if not proposals:
        return
    found: list[list[float]] = torch.stack([probs_figures(p) for p in proposals]).tolist()
    for excess, smallest, drawn in found:
        if not excess <= MASS_TOLERANCE or smallest < 0:  # NaN is not <= either
            raise DrafterError(
                "draft_probs are no distributions: NaN (a request may allow no token that the "
                "draft has), negative or not adding up to 1; draw from softmax rows in fp32"
            )
        if drawn <= 0:
            raise DrafterError("a token has probability 0 in the draft_probs it was drawn from")


def probs_figures(proposal: Proposal) -> Tensor:
    """Return the largest error of a row sum, the smallest entry and the smallest drawn probability.

    In trees the last is looked at where verification needs it: of siblings that were drawn without
    replacement. A token that was drawn twice counts as impossible.
    """
    rows = proposal.draft_probs
    assert rows is not None
    excess = (rows.sum(-1, dtype=torch.float32) - 1).abs().amax()
    smallest = rows.amin()
    drawn = torch.ones_like(excess)
    if proposal.tree.is_chain:
        drawn = rows.gather(-1, proposal.tokens[:, None].to(rows.device)).amin()
    elif proposal.choice is Choice.WITHOUT_REPLACEMENT:
        drawn = smallest_drawn(proposal, rows)
    return torch.stack([figure.to(torch.float64) for figure in (excess, smallest, drawn)])


def smallest_drawn(proposal: Proposal, rows: Tensor) -> Tensor:
    """Smallest probability of a drawn node in a tree; 0 where siblings share a token."""
    tree, tokens = proposal.tree, proposal.tokens.to(rows.device)
    smallest = rows.new_ones(())
    for row, parent in enumerate(expanded(tree)):
        children = tree.children(parent)
        ids = tokens[list(children)]
        is_wrong = len(set(ids.tolist())) < len(children)
        smallest = torch.minimum(smallest, rows[row, ids].amin() * (not is_wrong))
    return smallest
