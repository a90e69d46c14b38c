"""Drafting from marginals: one distribution per position after the last token, from one pass.

No distribution is conditional on the tokens of the others. So a chain whose tokens are drawn from
one each is a draw from their product, which verification of chains takes like any draft's. Greedy
requests get the most likely token of each; so do those with penalties, whose distributions depend
on the tokens before, and those that are walked. A tree has that chain and the paths of the largest
products (DDTree, arXiv 2604.12989); its nodes are deterministic, and it is walked.
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
from forerun.models.base import LanguageModel
from forerun.sampling.config import Choice, draft_params, resolve_verification
from forerun.sampling.kernels import largest, on_host
from forerun.sampling.noise import Purpose, draw, position_key, step_keys, uniform
from forerun.sampling.processors import failed_rows, pack_params, target_probs
from forerun.sampling.proposal import Assurance, Proposal
from forerun.sampling.walk import target_tokens
from forerun.theory.tree import TokenTree

logger = logging.getLogger("forerun.drafting")

MAX_WIDTH = 8


class MarginalDrafter(Drafter):
    """Drafts chains and trees from one distribution per position.

    Attributes:
        target: the model that is drafted for.
        num_positions: number of distributions that are predicted.
        target_ids: target token of every logit; None: all of them in order.
    """

    max_width = MAX_WIDTH
    target: LanguageModel
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
        depth = max(shape.depth for shape in shapes)
        logits = self.predict([requests[at] for at in able], depth).float()
        groups: dict[Choice | None, list[int]] = {}
        for place, (at, shape) in enumerate(zip(able, shapes, strict=True)):
            choice = choose_method(requests[at]) if shape.width == 1 else None
            groups.setdefault(choice, []).append(place)
        for choice, places in groups.items():
            its_shapes = [shapes[place] for place in places]
            rows = logits if len(groups) == 1 else logits[:, places]
            if choice is None:
                drafted = self._draft_trees(its_shapes, rows)
            else:
                of_group = [requests[able[place]] for place in places]
                drafted = self._draft_chains(of_group, its_shapes, rows, choice)
            for place, proposal in zip(places, drafted, strict=True):
                proposals[able[place]] = proposal
        return proposals

    def _draft_trees(
        self, shapes: Sequence[Tree], logits: Float[Tensor, "positions requests vocab"]
    ) -> list[Proposal | None]:
        width = min(max(shape.width for shape in shapes), logits.shape[-1])
        values, tokens = logits.log_softmax(-1).topk(width, dim=-1)
        lists = on_host(tokens if self.target_ids is None else self.target_ids[tokens], values)
        proposals: list[Proposal | None] = []
        for place, shape in enumerate(shapes):
            ids, log_probs = ([level[place] for level in column] for column in lists)
            proposals.append(build_proposal([*zip(ids, log_probs, strict=True)], shape))
        return proposals

    def _draft_chains(
        self,
        requests: Sequence[DraftRequest],
        shapes: Sequence[Tree],
        logits: Float[Tensor, "positions requests vocab"],
        choice: Choice,
    ) -> list[Proposal | None]:
        """Draft chains up to the first distribution that is not valid, whatever was drawn."""
        depth, num_requests, _ = logits.shape
        rows, probs = logits.flatten(0, 1), None
        if choice is Choice.DETERMINISTIC:
            best, tokens = largest(rows)
            is_valid = best > float("-inf")
            tokens = tokens if self.target_ids is None else self.target_ids[tokens]
        else:
            params = [draft_params(request.params) for request in requests]
            packed = pack_params(params, rows.device, [*range(num_requests)] * depth)
            rows = target_probs(rows, packed)
            is_valid = ~failed_rows(rows)
            if self.target_ids is not None:
                whole = rows.new_zeros(len(rows), self.target.vocab_size)
                rows = whole.index_copy_(1, self.target_ids, rows)
            probs = rows.view(depth, num_requests, -1)
            levels = range(depth)
            if choice is Choice.COUPLED:
                keys = [
                    [position_key(r.noise_key, len(r.ids) + n) for n in levels] for r in requests
                ]
                tokens = target_tokens(rows, torch.tensor(keys, device=rows.device).t().flatten())
            else:
                keys = [step_keys(r.noise_key, len(r.ids), levels, Purpose.DRAFT) for r in requests]
                tokens = draw(rows, uniform(torch.tensor(keys, device=rows.device).t().flatten()))
        tokens, (valid,) = tokens.view(depth, num_requests), on_host(is_valid.view(depth, -1))
        proposals: list[Proposal | None] = []
        for place, shape in enumerate(shapes):
            length = next(
                (n for n in range(shape.num_nodes) if not valid[n][place]), shape.num_nodes
            )
            own = None if probs is None else probs[:length, place]
            proposals.append(build_chain(tokens[:length, place], own, choice) if length else None)
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


def choose_method(request: DraftRequest) -> Choice:
    """Return how the tokens of a request's chains are chosen."""
    if draft_params(request.params).greedy or request.history is not None:
        return Choice.DETERMINISTIC
    if request.coupled:
        return Choice.COUPLED
    is_walked = resolve_verification(request.params, Choice.SAMPLED) == "walk"
    return Choice.DETERMINISTIC if is_walked else Choice.SAMPLED


def build_chain(
    tokens: Int64[Tensor, " nodes"],
    draft_probs: Float[Tensor, "nodes vocab"] | None,
    choice: Choice,
) -> Proposal:
    return Proposal(
        tokens=tokens,
        tree=TokenTree.chain(len(tokens)),
        choice=choice,
        draft_probs=draft_probs,
        assurance=Assurance(tokens=tokens, draft_probs=draft_probs),
    )


def build_proposal(candidates: Sequence[Candidates], shape: Tree) -> Proposal:
    """Return the tree of the most probable paths, with that of the most likely tokens."""

    def expand(path: Path) -> Candidates | None:
        return candidates[len(path)] if len(path) < len(candidates) else None

    return build_tree(expand, shape, chain_first=True).proposal("budget", is_assured=True)
