"""What is run: engines, the requests they get, and the complaint about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.lab.dice import Dice
from tests.lab.laboratory import Lab

from forerun.engine.engine import Engine
from forerun.sampling.config import SamplingParams

__all__ = ["Fault", "FaultRequest", "FaultSetup", "Inject", "Stage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRequest:
    """One prompt.

    Attributes:
        prompt: its token ids.
        params: how it is continued.
        tags: what it is like.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Requests that one engine gets.

    Attributes:
        name: tells its requests from those of other stages.
        engine: which.
        requests: in order; the engine's own limit says how many run at once.
        target: name or folder of its target, for the header of the trace.
        draft: of its draft; None without a draft model.
    """

    name: str
    engine: Engine
    requests: Sequence[FaultRequest]
    target: str
    draft: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSetup:
    """A run to be: a plain stage to compare with, then what is complained about.

    Attributes:
        stages: in order; the last one's engine is the one to probe.
        says: what a person would enter besides the trace, as facts.
        client: what a client reports of the last stage, from its tokens, chunks and seconds.
        draft_folder: files of the draft as it was published; None for those of the last stage.
    """

    stages: Sequence[Stage]
    says: Mapping[str, float] = field(default_factory=dict)
    client: Callable[[int, int, float], Mapping[str, float]] | None = None
    draft_folder: Path | None = None


Inject = Callable[[Lab, Dice], FaultSetup]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that can be wrong, or nothing.

    Attributes:
        name: of the experiment.
        label: the diagnosis that is right; "healthy" for a control.
        what: what is wrong and where it is put in.
        varies: what a seed changes, besides prompts and noise.
        inject: makes the run of a seed.
    """

    name: str
    label: str
    what: str
    varies: str
    inject: Inject
