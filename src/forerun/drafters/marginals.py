"""Drafting from marginals: one distribution per position after the last token, from one pass.

No distribution is conditional on the tokens of the others. A chain has the most likely token of
each; a tree has that chain and the paths of the largest products (DDTree, arXiv 2604.12989). Every
node is deterministic, and the walk over them leaves the target's distribution unchanged.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from forerun.control.base import Plan, Tree
from forerun.drafters.base import Drafter, DraftRequest, StepOutcome
from forerun.drafters.tree_growth import Candidates, Path, build_tree
from forerun.sampling.kernels import largest, on_host
from forerun.sampling.proposal import Proposal

logger = logging.getLogger("forerun.drafting")

MAX_WIDTH = 8


class MarginalDrafter(Drafter):
    """Drafts chains and trees from one distribution per position.

    Attributes:
        num_positions: number of distributions that are predicted.
        target_ids: target token of every logit; None: all of them in order.
    """

    max_width = MAX_WIDTH
    num_positions: int
    target_ids: Int64[Tensor, " draft_vocab"] | None = None
    _warned = False

    @abstractmethod
    def is_ready(self, request: DraftRequest) -> bool:
        """Whether the target's features of all committed rows of a request are known."""

    @abstractmethod
    def predict(
        self, requests: Sequence[DraftRequest], num_positions: int
    ) -> Float[Tensor, "positions requests vocab"]:
        """Return the logits of the next positions of ready requests."""

    @torch.inference_mode()
    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | None]:
        """Draft at most `num_positions` levels; requests that are not ready are decoded plainly."""
        proposals: list[Proposal | None] = [None] * len(requests)
        able = [
            at
            for at, (request, plan) in enumerate(zip(requests, plans, strict=True))
            if plan.num_speculative_tokens and self.is_ready(request)
        ]
        if not able:
            return proposals
        shapes = [choose_shape(plans[at], self.num_positions) for at in able]
        depth, width = max(s.depth for s in shapes), max(s.width for s in shapes)
        logits = self.predict([requests[at] for at in able], depth).float()
        if width == 1:  # which is more likely than which does not matter
            scores, tokens = (part.view(depth, -1, 1) for part in largest(logits.flatten(0, 1)))
        else:
            scores, tokens = logits.log_softmax(-1).topk(min(width, logits.shape[-1]), dim=-1)
        lists = on_host(tokens if self.target_ids is None else self.target_ids[tokens], scores)
        for place, (at, shape) in enumerate(zip(able, shapes, strict=True)):
            ids, values = ([level[place] for level in column] for column in lists)
            proposals[at] = build_proposal([*zip(ids, values, strict=True)], shape)
        return proposals

    def warn_of_missing(self, outcome: StepOutcome) -> None:
        """Forget a request whose rows came without features, and say so once."""
        self.forget(outcome.request_id)
        if not self._warned:
            logger.warning(
                "request %s decodes plainly: the target gave no features of layers %s, which the "
                "drafter %s reads; later requests without them are not reported",
                outcome.request_id,
                self.required_features,
                self.method,
            )
        self._warned = True


def choose_shape(plan: Plan, most: int) -> Tree:
    """Return the shape to draft, with at most `most` levels; a chain is the tree of width 1."""
    shape = plan.shape
    depth = min(shape.depth, most)
    if isinstance(shape, Tree):
        return replace(shape, depth=depth, width=min(shape.width, MAX_WIDTH))
    return Tree(num_nodes=min(shape.num_nodes, depth), depth=depth, width=1)


def build_proposal(candidates: Sequence[Candidates], shape: Tree) -> Proposal:
    """Return the tree of the most probable paths, with that of the most likely tokens."""

    def expand(path: Path) -> Candidates | None:
        return candidates[len(path)] if len(path) < len(candidates) else None

    return build_tree(expand, shape, chain_first=True).proposal("budget", is_assured=True)
