"""The contract of a controller: states of requests in, plans for some steps out, records back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Generic, NamedTuple, TypeVar

from forerun.errors import InvalidRequest
from forerun.theory.record import StepRecord

USUAL_WIDTH = 4
"""Most children of a node where no width is given; later ranks are seldom accepted."""


def usual_depth(num_nodes: int) -> int:
    """Return the levels of a binary tree with so many nodes.

    Deeper trees take more draft passes, and fewer passes are the advantage of a tree over a chain.
    """
    return max(1, num_nodes.bit_length())


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A chain: the shape of a draft in which each token follows the one before it."""

    num_tokens: int = 0

    @property
    def num_nodes(self) -> int:
        """The most draft nodes, each of which is a row of the target pass."""
        return self.num_tokens

    @property
    def depth(self) -> int:
        """The most draft tokens that one step can accept."""
        return self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A tree: the shape of a draft that holds alternatives at each position.

    Attributes:
        depth: the most levels, and so the most draft tokens that one step can accept; at least 1.
    """

    num_nodes: int
    depth: int
    width: int

    def __post_init__(self) -> None:
        for name in ("num_nodes", "depth", "width"):
            if getattr(self, name) < 1:
                raise InvalidRequest(
                    f"a draft tree with {name} {getattr(self, name)}; it must be at least 1"
                )

    @classmethod
    def of_nodes(cls, num_nodes: int) -> Tree:
        return cls(num_nodes=num_nodes, depth=usual_depth(num_nodes), width=USUAL_WIDTH)

    @classmethod
    def parse(cls, text: str) -> Tree:
        """Parse `NODES[,DEPTH,WIDTH]`, such as "7" or "7,3,4"; raises InvalidRequest."""
        try:
            numbers = [int(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) == 1:
            return cls.of_nodes(numbers[0])
        if len(numbers) != 3:
            raise InvalidRequest(
                f"tree {text!r} is not NODES or NODES,DEPTH,WIDTH; examples are 7 and 7,3,4"
            )
        return cls(num_nodes=numbers[0], depth=numbers[1], width=numbers[2])

    def __str__(self) -> str:
        return f"{self.num_nodes},{self.depth},{self.width}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The drafter and shape of one request for one step.

    Attributes:
        shape: the largest draft that may be proposed.
        probe: the draft is made to update an acceptance estimate, not because it is expected to be
            the fastest choice.
    """

    method: str = "plain"
    shape: Chain | Tree = field(default_factory=Chain)
    probe: bool = False

    @classmethod
    def chain(cls, method: str, num_tokens: int, *, probe: bool = False) -> Plan:
        """Return the plan to draft a chain of `num_tokens`; 0 tokens give the plain plan."""
        if num_tokens == 0:
            return cls()
        return cls(method=method, shape=Chain(num_tokens=num_tokens), probe=probe)

    @property
    def num_speculative_tokens(self) -> int:
        """The most draft nodes: K of a chain, the budget of a tree."""
        return self.shape.num_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestState:
    """Properties of a request that a controller may use to decide its next step.

    Attributes:
        max_new: tokens that may still be emitted (context and max_tokens considered).
        allows_trees: whether the verifier that the request asks for takes trees.
    """

    request_id: str
    num_committed: int
    max_new: int
    temperature: float
    tags: tuple[str, ...] = ()
    allows_trees: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Limit on the number of rows in the target pass of a step, over all requests."""

    max_rows: int

    def nodes_each(self, num_requests: int) -> int:
        return self.max_rows // max(1, num_requests) - 1


class Decision(NamedTuple):
    """What a controller decides: the plans of the next steps, and for how many steps they stay.

    Attributes:
        plans: one per state, in order.
        num_steps: the controller is asked again after so many steps, or when the batch changes, or
            when a plan had to be cut.
        is_observed: False where `Controller.observe` needs the first of these steps alone; then no
            records are made of the others, and `Controller.skip` receives how long they took.
    """

    plans: Sequence[Plan]
    num_steps: int = 1
    is_observed: bool = True


class Controller(ABC):
    """Decides the plans of every step.

    A controller is deterministic: it reads neither a clock nor random numbers, only its arguments.
    """

    @abstractmethod
    def decide(self, states: Sequence[RequestState], capacity: Capacity) -> Decision:
        """Return one plan per state, in order, for the requests that may draft in the next steps.

        The engine shortens a plan to `max_new - 1` accepted tokens and to its own K. A request
        whose prompt is still being read, or whose drafter asked for a pause, takes part in the step
        but is not among the states.
        """

    def observe(self, records: Sequence[StepRecord]) -> None:  # noqa: B027 (some learn nothing)
        """Receive the records of a step in which the last plans were used.

        Requests that were not among the states have a record too, once they emit tokens.
        """

    def skip(self, num_steps: int, seconds: float) -> None:  # noqa: B027 (as above)
        """Receive how many steps were not observed, and what they took; before `decide`."""

    def choices(self) -> list[MethodChoice]:
        """Return what was chosen so far, with the speed expected of every way of decoding."""
        return []


Request = TypeVar("Request")


class DecisionReuse(Generic[Request]):
    """Asks a controller, and follows its decision for as many steps as it says.

    Attributes:
        num_left: steps for which the plans stay, after the present one.
        is_observed: whether the controller receives the records of the present step.
        drafts: whether one of the plans drafts.
    """

    def __init__(self, controller: Controller, capacity: Capacity) -> None:
        self.controller = controller
        self.capacity = capacity
        self.num_left = 0
        self.is_observed = True
        self.drafts = False
        self._decision = Decision(())
        self._requests: Sequence[Request] = ()
        self._num_skipped, self._skipped_s = 0, 0.0

    def plan(
        self,
        requests: Sequence[Request],
        describe: Callable[[Request], RequestState],
        *,
        is_whole: bool,
    ) -> Sequence[Plan]:
        """Return the plans of the requests for the next step, asked for or reused.

        Args:
            describe: called for every request where the controller is asked.
            is_whole: whether no other requests take part in the step; the time of one in which they
                do is not counted with those that are not observed.
        """
        lasts = self.num_left > 0 and (is_whole or self._decision.is_observed)
        if lasts and requests == self._requests:
            self.advance()
            return self._decision.plans
        if self._num_skipped:
            self.controller.skip(self._num_skipped, self._skipped_s)
            self._num_skipped, self._skipped_s = 0, 0.0
        states = [describe(request) for request in requests]
        decision = self._decision = self._decide(states)
        # Steps with other requests are never skipped, so a decision that skips some is for one.
        lasts = is_whole or decision.is_observed
        self.num_left, self._requests = max(0, decision.num_steps - 1) if lasts else 0, requests
        self.is_observed = True
        self.drafts = any([plan.num_speculative_tokens for plan in decision.plans])
        return decision.plans

    def _decide(self, states: Sequence[RequestState]) -> Decision:
        """Ask the controller; raises InvalidRequest if what it returns is no decision."""
        decision: object = self.controller.decide(states, self.capacity)
        name = type(self.controller).__name__
        if not isinstance(decision, Decision) or type(decision.num_steps) is not int:
            raise InvalidRequest(
                f"{name}.decide returned {decision!r:.100}, but must return a Decision of plans "
                "and a whole number of steps"
            )
        plans: object = decision.plans
        if not isinstance(plans, Sequence) or len(plans) != len(states):
            raise InvalidRequest(
                f"{name}.decide must return a list with one plan for each of the {len(states)} "
                f"requests, not {plans!r:.100}"
            )
        return decision

    def end(self) -> None:
        """Ask the controller again at the next step."""
        self.num_left, self._requests = 0, ()

    def advance(self) -> bool:
        """Begin one more step with the present plans, and return whether it is observed."""
        self.num_left -= 1
        self.is_observed = self._decision.is_observed
        return self.is_observed

    def skip(self, seconds: float) -> None:
        """Count a step that is not observed."""
        self._num_skipped += 1
        self._skipped_s += seconds


@dataclass(slots=True, kw_only=True)
class MethodChoice:
    """How often a controller chose one drafter or plain decoding, and the speed it expects of it.

    Attributes:
        num_steps: steps of single requests that it was planned for, probes included; plain steps
            in which the controller was not asked count too.
        num_probes: those of them that were made to measure it.
        shape: what it would draft now at its best: "K=4", "15 nodes in 4 levels", or "nothing"
            where no draft of it is expected to be faster than a plain step.
        tokens_per_s: expected of the last batch if all of it were decoded in this way; None
            before costs were measured.
    """

    method: str
    num_steps: int = 0
    num_probes: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    shape: str = "nothing"
    tokens_per_s: float | None = None

    def add(self, record: StepRecord) -> None:
        self.num_steps += 1
        self.num_drafted += record.num_drafted
        self.num_accepted += record.num_accepted

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    def __str__(self) -> str:
        probes = f", {self.num_probes} of them probes" if self.num_probes else ""
        text = f"{self.method} {self.num_steps} step{'' if self.num_steps == 1 else 's'}{probes}"
        if self.num_drafted:
            text += f", {self.num_accepted} of {self.num_drafted} drafted tokens accepted"
        if self.tokens_per_s is None:
            return text
        if self.method == "plain":
            drafts = ""
        elif self.shape == "nothing":
            drafts = ", no draft is expected to be faster than a plain step"
        else:
            drafts = f" drafting {self.shape}"
        return f"{text}, {self.tokens_per_s:.0f} tokens/s expected{drafts}"


def described(choices: Sequence[MethodChoice]) -> list[str]:
    """Return one line per way of decoding, the most used first."""
    ranked = sorted(choices, key=lambda choice: -choice.num_steps)
    return [f"chosen: {choice}" for choice in ranked]
