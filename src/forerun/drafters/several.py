"""Several drafters behind one interface: every plan names the drafter that drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from forerun.control.base import Plan
from forerun.drafters.base import Drafter, DraftRequest, Pause, StepOutcome, TreeDrafter
from forerun.errors import DrafterError
from forerun.sampling.proposal import Proposal

__all__ = ["SeveralDrafters", "named_by_method", "tree_methods"]


class SeveralDrafters:
    """Passes every request on to the drafter that its plan names.

    A pause of one of them is not a pause of all, so it only means that it proposes nothing.

    Args:
        drafters: by the names that plans call them.
    """

    def __init__(self, drafters: Mapping[str, Drafter]) -> None:
        self.drafters = drafters
        self._proposed: dict[str, str] = {}

    @property
    def method(self) -> str:
        """Method of the first drafter, which is used where no controller chooses."""
        return next(iter(self.drafters))

    @property
    def required_features(self) -> tuple[int, ...]:
        """Layers that any of the drafters reads."""
        return tuple(sorted({i for d in self.drafters.values() for i in d.required_features}))

    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | None]:
        """Return every request's proposal from the drafter of its plan."""
        proposals: list[Proposal | None] = [None] * len(requests)
        for method in dict.fromkeys(plan.method for plan in plans):
            drafter = self.drafters.get(method)
            if drafter is None:
                raise DrafterError(
                    f"a plan names the drafter {method!r}; there are {', '.join(self.drafters)}"
                )
            places = [at for at, plan in enumerate(plans) if plan.method == method]
            answers = drafter.propose([requests[at] for at in places], [plans[at] for at in places])
            for at, answer in zip(places, answers, strict=True):
                if not isinstance(answer, Pause):
                    proposals[at] = answer
                self._proposed[requests[at].request_id] = method
        return proposals

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Report every step to every drafter; a proposal only to the one that made it."""
        makers = [self._proposed.pop(outcome.request_id, None) for outcome in outcomes]
        layers = self.required_features
        for method, drafter in self.drafters.items():
            columns = [layers.index(layer) for layer in drafter.required_features]
            drafter.observe(
                [
                    replace(
                        outcome,
                        proposal=outcome.proposal if maker == method else None,
                        features=outcome.features[:, columns]
                        if columns and outcome.features is not None
                        else None,
                    )
                    for outcome, maker in zip(outcomes, makers, strict=True)
                ]
            )

    def forget(self, request_id: str) -> None:
        """Drop all state of a request, in all of them, even where one of them raises."""
        self._proposed.pop(request_id, None)
        with ExitStack() as others:
            for drafter in self.drafters.values():
                others.callback(drafter.forget, request_id)


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
