"""Drafting with Medusa heads, which read the target's last hidden state.

A step costs one product per head and one pass of the output matrix over as many rows, whatever the
shape. Heads know nothing of each other's tokens, so their candidates are marginals: every node is
deterministic, and the walk of the target over them leaves its distribution unchanged. What the
reference calls typical acceptance changes the distribution and is not done here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from forerun.control.base import Plan, Tree
from forerun.drafters.base import DraftRequest, StepOutcome
from forerun.drafters.medusa_head import MedusaHeads, read_medusa
from forerun.drafters.tree_builder import Candidates, build_tree
from forerun.drafters.tree_builder import Path as TokenPath
from forerun.errors import IncompatibleDraft
from forerun.models.base import LanguageModel, StoredModel
from forerun.sampling.config import Choice
from forerun.sampling.kernels import on_host
from forerun.sampling.proposal import Assurance, Proposal

logger = logging.getLogger("forerun.drafting")

MAX_WIDTH = 8


class MedusaDrafter:
    """Drafts chains and trees with Medusa heads.

    Args:
        heads: on the target's device and in its dtype.
        target: gives its last hidden states, its final norm and its output matrix.
    """

    method = "medusa"
    max_width = MAX_WIDTH

    def __init__(self, heads: MedusaHeads, target: LanguageModel) -> None:
        self.heads = heads
        self.target = target
        self.required_features = (target.num_layers,)
        self._last: dict[str, Float[Tensor, " width"]] = {}
        self._warned = False

    @torch.inference_mode()
    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | None]:
        """Draft as many levels as there are heads; requests without a state are decoded plainly."""
        proposals: list[Proposal | None] = [None] * len(requests)
        able = [
            at
            for at, (request, plan) in enumerate(zip(requests, plans, strict=True))
            if request.request_id in self._last and plan.num_speculative_tokens
        ]
        if not able:
            return proposals
        shapes = [shape_of(plans[at], self.heads.config.num_heads) for at in able]
        depth, width = max(s.depth for s in shapes), max(s.width for s in shapes)
        hidden = torch.stack([self._last[requests[at].request_id] for at in able])
        log_probs = self._log_probs(hidden, depth)
        top = log_probs.topk(min(width, log_probs.shape[-1]), dim=-1)
        entropies = torch.special.entr(log_probs.exp()).sum(-1)
        lists = on_host(top.indices, top.values, entropies)
        for place, (at, shape) in enumerate(zip(able, shapes, strict=True)):
            tokens, values, measured = ([level[place] for level in column] for column in lists)
            candidates = [*zip(tokens, values, strict=True)]
            proposals[at] = proposal_of(candidates, measured, shape, plans[at])
        return proposals

    def _log_probs(
        self, hidden: Float[Tensor, "requests width"], depth: int
    ) -> Float[Tensor, "depth requests vocab"]:
        normed = self.target.final_norm(hidden)
        logits: Tensor = self.heads(normed, self.target.head, depth)
        return logits.float().log_softmax(-1)

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Store the target's hidden state at the last committed row of every request."""
        for outcome in outcomes:
            if outcome.features is None:
                self._last.pop(outcome.request_id, None)
                self._warn(outcome.request_id)
            elif len(outcome.features):
                self._last[outcome.request_id] = outcome.features[-1, 0].clone()

    def _warn(self, request_id: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "request %s decodes plainly: the target gave no hidden states, which Medusa heads "
                "read; later requests without them are not reported",
                request_id,
            )

    def forget(self, request_id: str) -> None:
        self._last.pop(request_id, None)


def shape_of(plan: Plan, num_heads: int) -> Tree:
    """Return the shape to draft, no deeper than there are heads; a chain is the tree of width 1."""
    shape = plan.shape
    depth = min(shape.depth, num_heads)
    if isinstance(shape, Tree):
        return replace(shape, depth=depth, width=min(shape.width, MAX_WIDTH))
    return Tree(num_nodes=min(shape.num_nodes, depth), depth=depth, width=1)


def proposal_of(
    candidates: Sequence[Candidates], entropies: Sequence[float], shape: Tree, plan: Plan
) -> Proposal:
    """Return the most probable paths, or a chain up to the plan's stop rule."""
    values: tuple[float, ...] | None = None
    reason = "budget"
    if plan.stop is not None and shape.width == 1:
        is_entropy = plan.stop.measure == "entropy"
        measured = [
            entropy if is_entropy else float(torch.tensor(level[1][0]).exp())
            for level, entropy in zip(candidates, entropies, strict=True)
        ][: shape.depth]
        length = next((n for n, v in enumerate(measured) if n and plan.stop.stops(v)), shape.depth)
        reason = "stop_rule" if length < shape.depth else "budget"
        shape = replace(shape, num_nodes=min(shape.num_nodes, length), depth=length)
        values = tuple(measured[:length])

    def expand(path: TokenPath) -> Candidates | None:
        return candidates[len(path)] if len(path) < len(candidates) else None

    built = build_tree(expand, shape)
    tokens = torch.tensor(built.tokens, dtype=torch.int64)
    return Proposal(
        tokens=tokens,
        tree=built.tree,
        choice=Choice.DETERMINISTIC,
        stop_reason=reason,
        stop_values=values,
        assurance=Assurance(tokens=tokens, draft_probs=None),
    )


def load_medusa(folder: Path, target: LanguageModel) -> MedusaDrafter:
    """Load the Medusa heads in a folder for a loaded target.

    Raises:
        InvalidModel: the folder is damaged or of an unsupported kind.
        IncompatibleDraft: the heads were made for another target.
        UnsupportedFeatures: the target has no final norm or output matrix that they could use.
    """
    heads = read_medusa(folder, vocab_size=target.vocab_size)
    sizes = {
        "hidden size": (heads.config.hidden_size, target.hidden_size),
        "vocabulary": (heads.config.vocab_size, target.vocab_size),
    }
    for name, (wanted, given) in sizes.items():
        if wanted != given:
            raise IncompatibleDraft(
                f"the Medusa heads in {folder} were made for a target with {name} {wanted}, this "
                f"target has {given}: use heads that were trained for this target"
            )
    dtype = target.dtype if isinstance(target, StoredModel) else torch.float32
    # A target without norm or matrix is refused before any request.
    hidden = torch.zeros((1, target.hidden_size), dtype=dtype, device=target.device)
    target.head(target.final_norm(hidden))
    return MedusaDrafter(heads.to(device=target.device, dtype=dtype).requires_grad_(False), target)
