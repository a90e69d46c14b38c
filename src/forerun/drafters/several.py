"""Several drafters behind one interface; each plan chooses one by its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from forerun.control.base import Plan, Tree
from forerun.drafters.base import (
    Drafter,
    DraftRequest,
    Pause,
    StepOutcome,
    TopTokensDrafter,
    TreeDrafter,
)
from forerun.drafters.tree_builder import merged
from forerun.errors import DrafterError
from forerun.sampling.proposal import Proposal


class SeveralDrafters:
    """Passes every request on to the drafter that its plan names.

    A plan for a tree may name several, as in "suffix+draft_model": the best nodes of all their
    trees with `Proposal.log_probs` are proposed as one deterministic tree, verified by the walk.

    A pause of one of them is not a pause of all, so it only means that it proposes nothing.

    Args:
        drafters: by the names that plans call them.
    """

    def __init__(self, drafters: Mapping[str, Drafter]) -> None:
        self.drafters = drafters
        self._proposed: dict[str, Mapping[str, Proposal | None]] = {}

    @property
    def method(self) -> str:
        """Method of the first drafter, the default where no controller chooses."""
        return next(iter(self.drafters))

    @property
    def required_features(self) -> tuple[int, ...]:
        """Layers whose features at least one of the drafters reads."""
        return tuple(sorted({i for d in self.drafters.values() for i in d.required_features}))

    @property
    def required_top_k(self) -> int:
        """The largest number of the target's top tokens that one of the drafters needs."""
        each = self.drafters.values()
        return max([d.required_top_k for d in each if isinstance(d, TopTokensDrafter)], default=0)

    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | None]:
        """Return every request's proposal from the drafters of its plan."""
        answers: list[dict[str, Proposal | None]] = [{} for _ in requests]
        named = [self._named(plan) for plan in plans]
        for method in dict.fromkeys(method for methods in named for method in methods):
            places = [at for at, methods in enumerate(named) if method in methods]
            # A merged tree is deterministic, and so are its parts.
            asked = [
                plans[at] if len(named[at]) == 1 else replace(plans[at], verification="walk")
                for at in places
            ]
            found = self.drafters[method].propose([requests[at] for at in places], asked)
            for at, answer in zip(places, found, strict=True):
                answers[at][method] = None if isinstance(answer, Pause) else answer
        for request, parts in zip(requests, answers, strict=True):
            self._proposed[request.request_id] = parts
        return [
            _united([p for p in parts.values() if p is not None and p.num_drafted], plan)
            for parts, plan in zip(answers, plans, strict=True)
        ]

    def _named(self, plan: Plan) -> list[str]:
        """Return the names of a plan's drafters; the first one drafts if the plan is a chain."""
        methods = [plan.method] if plan.method in self.drafters else plan.method.split("+")
        for method in methods:
            if method not in self.drafters:
                raise DrafterError(
                    f"a plan names the drafter {method!r}; there are {', '.join(self.drafters)}"
                )
        return methods if isinstance(plan.shape, Tree) else methods[:1]

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Pass every outcome to every drafter, together with the drafter's own proposal."""
        parts = [self._proposed.pop(outcome.request_id, {}) for outcome in outcomes]
        layers = self.required_features
        for method, drafter in self.drafters.items():
            columns = [layers.index(layer) for layer in drafter.required_features]
            drafter.observe(
                [
                    replace(
                        outcome,
                        proposal=own.get(method) if outcome.proposal is not None else None,
                        features=outcome.features[:, columns]
                        if columns and outcome.features is not None
                        else None,
                    )
                    for outcome, own in zip(outcomes, parts, strict=True)
                ]
            )

    def forget(self, request_id: str) -> None:
        """Drop the state of a request in every drafter, even if one of them raises."""
        self._proposed.pop(request_id, None)
        with ExitStack() as others:
            for drafter in self.drafters.values():
                others.callback(drafter.forget, request_id)


def _united(parts: Sequence[Proposal], plan: Plan) -> Proposal | None:
    """Merge the trees with `log_probs`, if two or more have them; otherwise take the first part."""
    ranked = [part for part in parts if part.log_probs is not None]
    if len(ranked) > 1 and isinstance(plan.shape, Tree):
        return merged(ranked, plan.shape).proposal("budget")
    return parts[0] if parts else None


def named_by_method(drafters: Sequence[Drafter]) -> dict[str, Drafter]:
    """Return drafters by their methods; the second of one method is called method-2, and so on."""
    named: dict[str, Drafter] = {}
    for drafter in drafters:
        count = sum(name.partition("-")[0] == drafter.method for name in named)
        named[drafter.method if not count else f"{drafter.method}-{count + 1}"] = drafter
    return named


def tree_methods(drafter: Drafter) -> tuple[str, ...]:
    """Return the methods that propose trees, of one drafter or of several behind one interface."""
    each = drafter.drafters if isinstance(drafter, SeveralDrafters) else {drafter.method: drafter}
    return tuple(name for name, d in each.items() if isinstance(d, TreeDrafter) and d.max_width > 1)
