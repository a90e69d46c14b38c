"""The suite checks types and shapes in calls of every function of the package, while tests run.

With every call checked an engine is nine times slower, and what a test calls 100,000 times has
the same types each time. So the first calls of every function in each test are checked; the full
grid checks all calls.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, is_dataclass
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

# Type checkers read `float` as "int too", hence the numeric tower.
CHECK = beartype(conf=BeartypeConf(is_pep484_tower=True))
JAXTYPED = jaxtyping.jaxtyped


@dataclass
class CallBudget:
    """How many calls of a function are checked in one test.

    Attributes:
        per_function: checked calls of each function in each test; None checks all.
        is_off: whether no call is checked.
        test: number of the test that runs.
    """

    per_function: int | None = 3
    is_off: bool = False
    test: int = 0

    def restart(self) -> None:
        """Check calls again, as many as a test may have."""
        self.test += 1
        self.is_off = False


BUDGET = CallBudget()


def install(modules: Iterable[str]) -> None:
    """Check calls of what these modules define; nothing may have imported them yet."""
    jaxtyping.jaxtyped = lambda typechecker: checked  # what the hook decorates with
    jaxtyping.install_import_hook([*modules], "tests.checking.checked_from_first_call")


def checked(thing: Any) -> Any:
    """Check the first calls of a function, or of the `__init__` of a dataclass.

    A function within a function would be prepared at every call of that one, which costs more than
    its own work: the full grid alone does so.
    """
    if inspect.isclass(thing):
        if is_dataclass(thing) and not hasattr(thing.__init__, "is_checked"):
            thing.__init__ = counted(thing.__init__)
        return thing
    is_nested = "<locals>" in thing.__qualname__
    return thing if is_nested and BUDGET.per_function is not None else counted(thing)


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check as many calls of a function as a test may have."""
    check = JAXTYPED(function, typechecker=checked_from_first_call)
    test, num_left = -1, 0

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal test, num_left
        if BUDGET.is_off:
            return function(*args, **kwargs)
        if BUDGET.per_function is not None:
            if test != BUDGET.test:
                test, num_left = BUDGET.test, BUDGET.per_function
            if num_left == 0:
                return function(*args, **kwargs)
            num_left -= 1
        return check(*args, **kwargs)

    call.is_checked = True
    return call


def checked_from_first_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make the checker of a function at its first call: most functions have none."""
    check: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal check
        if check is None:
            check = CHECK(function)
        return check(*args, **kwargs)

    return call
