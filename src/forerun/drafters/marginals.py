"""Drafting from marginals: one distribution per position after the last token, from one pass.

No distribution knows the tokens of the others, so chains are the most likely token of each, and
trees the paths of the largest products (DDTree, arXiv 2604.12989), which hold that chain always.
Every node is deterministic, and the walk of the target over them leaves its distribution unchanged.
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
from forerun.sampling.kernels import on_host
from forerun.sampling.proposal import Proposal

logger = logging.getLogger("forerun.drafting")

MAX_WIDTH = 8


class MarginalDrafter(Drafter):
    """Drafts chains and trees from one distribution per position.

    Attributes:
        max_tokens: number of these distributions.
        target_ids: target token of every logit; None: all of them in order.
    """

    max_width = MAX_WIDTH
    max_tokens: int
    target_ids: Int64[Tensor, " draft_vocab"] | None = None
    _warned = False

    @abstractmethod
    def is_ready(self, request: DraftRequest) -> bool:
        """Whether what is needed of the target was handed over for every row of a request."""

    @abstractmethod
    def predict(
        self, requests: Sequence[DraftRequest], num_positions: int
    ) -> Float[Tensor, "positions requests vocab"]:
        """Return the logits of the next positions of ready requests."""

    @torch.inference_mode()
    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | None]:
        """Draft at most `max_tokens` levels; requests that are not ready are decoded plainly."""
        proposals: list[Proposal | None] = [None] * len(requests)
        able = [
            at
            for at, (request, plan) in enumerate(zip(requests, plans, strict=True))
            if plan.num_speculative_tokens and self.is_ready(request)
        ]
        if not able:
            return proposals
        shapes = [shape_of(plans[at], self.max_tokens) for at in able]
        depth, width = max(s.depth for s in shapes), max(s.width for s in shapes)
        logits = self.predict([requests[at] for at in able], depth)
        log_probs = logits.float().log_softmax(-1)
        top = log_probs.topk(min(width, log_probs.shape[-1]), dim=-1)
        tokens_found = top.indices if self.target_ids is None else self.target_ids[top.indices]
        lists = on_host(tokens_found, top.values)
        for place, (at, shape) in enumerate(zip(able, shapes, strict=True)):
            tokens, values = ([level[place] for level in column] for column in lists)
            proposals[at] = proposal_of([*zip(tokens, values, strict=True)], shape)
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


def shape_of(plan: Plan, most: int) -> Tree:
    """Return the shape to draft, with at most so many levels; a chain is the tree of width 1."""
    shape = plan.shape
    depth = min(shape.depth, most)
    if isinstance(shape, Tree):
        return replace(shape, depth=depth, width=min(shape.width, MAX_WIDTH))
    return Tree(num_nodes=min(shape.num_nodes, depth), depth=depth, width=1)


def proposal_of(candidates: Sequence[Candidates], shape: Tree) -> Proposal:
    """Return the most probable paths, among them that of the most likely tokens."""

    def expand(path: Path) -> Candidates | None:
        return candidates[len(path)] if len(path) < len(candidates) else None

    return build_tree(expand, shape, chain_first=True).proposal("budget", is_assured=True)
