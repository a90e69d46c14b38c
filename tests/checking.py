"""The suite checks types and shapes in calls of every function of the package, while tests run.

With every call checked an engine is nine times slower, and what a test calls 100,000 times has
the same types each time. So the first calls of each test are checked; the full grid checks all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

# Type checkers read `float` as "int too", hence the numeric tower.
CHECK = beartype(conf=BeartypeConf(is_pep484_tower=True))


@dataclass
class CallBudget:
    """How many calls of this test are still checked.

    Attributes:
        per_test: checked calls of each test; None checks all.
        left: checked calls that this test has left.
    """

    per_test: int | None = 1000
    left: int = 0

    def restart(self) -> None:
        """Check calls again, as many as a test may have."""
        self.left = self.per_test or 0
        jaxtyping.config.update("jaxtyping_disable", False)

    def spend(self) -> None:
        """Count one checked call; behind the last one the check is switched off."""
        self.left -= 1
        if self.left == 0 and self.per_test is not None:
            jaxtyping.config.update("jaxtyping_disable", True)


BUDGET = CallBudget()


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check the arguments and the result of a function; the checker is made at its first call."""
    check: Callable[..., Any] | None = None

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal check
        if check is None:
            check = CHECK(function)
        BUDGET.spend()
        return check(*args, **kwargs)

    return counted
