"""Flags that several commands share, generated from the dataclasses of the library."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

from tyro.conf import UseAppendAction, arg

from forerun.bounded_read import read_text
from forerun.control.base import Tree
from forerun.control.config import ControllerName
from forerun.drafters.config import AUTO, NONE
from forerun.engine.config import EngineConfig
from forerun.errors import InvalidRequest, Range, UnreadableInput
from forerun.models.architecture import Runner, WeightFormat
from forerun.models.catalog import DEFAULT_TARGET
from forerun.sampling.config import SamplingParams, Verification

if TYPE_CHECKING:
    from forerun.trace.files import TraceWriter

MOST_THREADS = 256
"""Machines with more cores than this may use four threads per core."""

Model = Annotated[str, arg(name="model", aliases=("--target",))]
"""The target's name."""
LookAhead = Annotated[int, arg(name="num-speculative-tokens", aliases=("--k",))]
"""K, the most draft tokens per step."""


def check_writable(flag: str, path: Path | None) -> None:
    """Refuse a file that cannot be written, before any slow work begins; its content is kept."""
    if path is None:
        return
    try:
        if path.is_fifo():
            return  # opening one waits for its reader
        existed = path.exists()
        with path.open("a"):
            pass
        if not existed:
            path.unlink()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidRequest(f"{flag} {shortened(path)} cannot be written: {reason}") from error


def shortened(path: Path) -> str:
    """Shorten a very long path for a message by leaving out its middle."""
    text = str(path)
    return text if len(text) <= 200 else f"{text[:100]}…{text[-60:]}"


def check_threads(num_threads: int | None) -> None:
    most = max(MOST_THREADS, 4 * (os.cpu_count() or 1))
    if num_threads is not None:
        Range("--threads", 1, most, integer=True).check(num_threads)


def use_threads(num_threads: int | None) -> int:
    check_threads(num_threads)
    import torch

    if num_threads is not None:
        torch.set_num_threads(num_threads)
    return torch.get_num_threads()


def read_template(path: Path | None) -> str:
    """Return the text of the chat template that --chat-template names; empty without one."""
    if path is None:
        return ""
    try:
        template = read_text(path)
    except UnreadableInput as error:
        raise InvalidRequest(f"--chat-template: {error}") from error
    if not template.strip():
        raise InvalidRequest(f"--chat-template {path} is empty; it must hold a Jinja template")
    return template


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags:
    """Sampling parameters, as in the OpenAI API; those that the model states are its own."""

    temperature: float | None = None
    """0 is greedy (lowest id on ties). Default: what the model states in generation_config.json
    or its GGUF file, as for the next two; else 0."""
    top_p: float | None = None
    """Nucleus: the fewest most likely tokens whose probabilities sum to top_p."""
    top_k: int | None = None
    """Sample among the k most likely tokens; 0 or -1: among all."""
    seed: int | None = None
    """With a seed the text is the same whatever drafts. Default: another one each time."""
    max_tokens: int | None = 256
    """Most tokens of the text."""
    stop: UseAppendAction[tuple[str, ...]] = ()
    """Texts before which generation ends."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""
    verification: Verification = "auto"
    """Verifier; all are lossless. "auto": coupled with a seed, else block."""
    draft_temperature: float | None = None
    """Temperature of the draft alone, which never changes the text. Default: the request's."""

    def __post_init__(self) -> None:
        """Refuse unsupported values before a model is loaded."""
        self.params_for({})

    def params_for(self, defaults: Mapping[str, float]) -> SamplingParams:
        """Return the parameters, with the model's for flags that are left out."""
        flags = {item.name: getattr(self, item.name) for item in fields(self)}
        chosen = {name: value for name, value in flags.items() if value is not None}
        return SamplingParams(**{"temperature": 0.0, **defaults, **chosen})


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFlags:
    """The target, and the runner and resources of all models."""

    target: Model = DEFAULT_TARGET
    """Target: folder, hub name or zoo: name of the model whose text is wanted."""
    dtype: str = "auto"
    """auto (as stored), bfloat16, float16 or float32."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    runner: Runner = EngineConfig().runner
    """Runs the passes: native (CPU kernels), graphs (torch), eager (transformers) or auto."""
    threads: int | None = None
    """Threads of the passes. Default: as many as torch takes."""

    def resolve_drafts(
        self, named: Sequence[str], weights: WeightFormat = "auto"
    ) -> tuple[str, ...]:
        """Return the drafts that --draft names, "auto" by default; empty for plain decoding."""
        from forerun.engine.auto_drafts import with_auto
        from forerun.models.checkpoint import ModelFiles

        config = EngineConfig(runner=self.runner, weights=weights)
        target = ModelFiles.open(self.target)
        names, _ = with_auto(named or (AUTO,), target, self.device, self.dtype, config)
        drafts = tuple(map(str, names))
        for name in drafts:
            if drafts.count(name) > 1:
                raise InvalidRequest(f"--draft {name} is given twice")
        if NONE not in drafts:
            return drafts
        if len(drafts) > 1:
            raise InvalidRequest("--draft none decodes plainly; leave the other drafts out")
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFlags(TargetFlags):
    """Target and drafts, their runner and resources, and how many tokens are drafted."""

    draft: UseAppendAction[tuple[str, ...]] = ()
    """Draft model (folder, hub name or zoo: name), or one of:
    "suffix" copies from the text so far;
    "recycling" proposes what the target ranked highest after the same token before;
    "self:N" is the target's first N layers, "self:int4" and "self:int8" the target in fewer bits;
    "mtp" is the multi-token-prediction module that some targets ship with;
    "auto" tries the drafts at hand, see docs/choosing.md;
    "none" decodes plainly.
    Several may be given: the controller chooses one at every step.
    Default: auto."""
    k: LookAhead = EngineConfig().num_speculative_tokens
    """K: most tokens drafted per step; 0 decodes plainly."""
    tree: str | None = None
    """NODES or NODES,DEPTH,WIDTH: every draft is a tree with at most so many nodes, levels and
    children per node, in place of a chain of K tokens. Default: the controller chooses."""
    controller: ControllerName = EngineConfig().controller
    """Chooses how many tokens are drafted. auto: as many, up to K, as give most expected tokens per
    second; it learns costs and acceptance, and stops drafting where it does not pay. fixed: always
    K."""
    profile: UseAppendAction[tuple[Path, ...]] = ()
    """Costs measured by `forerun profile`, one file per draft model; auto is better from the first
    step with them. "suffix" needs none."""
    max_context: int = EngineConfig().max_context
    """Longest prompt and output together, cut to what the models hold."""
    weights: WeightFormat = EngineConfig().weights
    """Bits of the target's weights: auto (as stored), bf16, int8, int4, or int4-int8, which has an
    output layer of 8 bits. Fewer bits decode faster and change the text, in small models more."""
    draft_weights: WeightFormat = EngineConfig().draft_weights
    """The same of draft models; the text does not depend on them."""

    @property
    def draft_names(self) -> tuple[str, ...]:
        """Return the drafts; empty for plain decoding.

        Where no draft is named and no controller chooses, the first of "auto" is taken.
        """
        if self.k == 0 and not self.draft:
            return ()
        found = self.resolve_drafts(self.draft, self.weights)
        if len(found) > 1 and (self.tree is not None or self.controller != "auto"):
            if self.draft:
                self._refuse_several()
            return found[:1]
        return found

    @property
    def sources(self) -> tuple[str, ...]:
        """Return what to load: "auto" by its name, because drafts that it finds may fail."""
        names = self.draft or (AUTO,)
        return names if AUTO in names and len(self.draft_names) > 1 else self.draft_names

    @property
    def shape(self) -> Tree | None:
        if self.tree is None:
            return None
        if not self.draft_names:
            raise InvalidRequest("--tree needs a draft: plain decoding drafts nothing")
        if self.profile:
            raise InvalidRequest(
                "--tree fixes the shape of every draft, so --profile would change nothing; leave "
                "one of the two out"
            )
        return Tree.parse(self.tree)

    def _refuse_several(self) -> NoReturn:
        raise InvalidRequest(
            "several drafts need a controller that chooses between them, and a fixed K or --tree "
            "takes the first; give --controller auto without --tree"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFlags:
    """Form and content of the printed output."""

    color: bool = False
    """Colour every token by its source; a legend goes to stderr."""
    json: bool = False
    """Print one JSON object (text, token_ids, finish_reason, figures) instead of streaming."""
    verbose: bool = False
    """Also say how much was accepted at every position, and which drafts were chosen."""
    quiet: bool = False
    """Print the text alone: no figures, no notices and no warnings. Errors are still printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFlags:
    """Whether and where every step is recorded."""

    trace: Path | None = None
    """Write every step to FILE.jsonl."""

    def check(self) -> None:
        """Refuse a file that cannot be written."""
        if self.trace is None:
            return
        from forerun.trace.files import check_suffix

        check_suffix(self.trace)
        if self.trace.suffix == ".jsonl":
            check_writable("--trace", self.trace)

    @contextmanager
    def opened(self) -> Iterator[TraceWriter | None]:
        """Open the trace for writing; None without --trace."""
        if self.trace is None:
            yield None
            return
        from forerun.trace.files import open_trace

        with open_trace(self.trace) as writer:
            yield writer
