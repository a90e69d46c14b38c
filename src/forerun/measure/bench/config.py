"""Settings of comparisons; torch-free, so that the command line can read them cheaply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from types import MappingProxyType

from forerun.control.base import Tree
from forerun.control.config import ControllerName
from forerun.drafters.config import AUTO, NONE
from forerun.engine.config import EngineConfig
from forerun.errors import InvalidRequest
from forerun.models.architecture import WeightFormat
from forerun.models.catalog import PREFIX

DEMO_BLOCKS = 40
"""Blocks of the demonstration, which ends by its time."""
LEAST_BLOCKS = 2
"""Blocks without which there is no interval."""
SCOUT_BATCH = 8
"""Prompts decoded at once where nothing is timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftArms:
    """One draft with one arm per K and one per tree.

    Attributes:
        draft: folder, hub name or zoo: name of the draft model, or the name of a drafter.
        ks: every K to measure, ascending.
    """

    name: str
    draft: str
    ks: tuple[int, ...]
    trees: tuple[Tree, ...] = ()

    @property
    def max_nodes(self) -> int:
        return max((*self.ks, *(tree.num_nodes for tree in self.trees)))


def parse_arms(texts: Sequence[str]) -> tuple[DraftArms, ...]:
    """Parse arms of the command line, such as `zoo:code-2m@1,2,4` and `suffix@tree:7`.

    The form is `[NAME=]DRAFT@K[,K...][,tree:NODES[,DEPTH,WIDTH]]`; arms of one draft and name are
    joined. "plain" and "none" are allowed and change nothing: plain decoding is always the
    baseline. "auto" has the drafts at hand and chooses among them and K at every step, up to
    `auto@K`.
    """
    found: dict[str, DraftArms] = {}
    for text in texts:
        if text in ("plain", NONE):
            continue
        arm = _parse_arm(text)
        same = found.setdefault(arm.name, arm)
        if same is arm:
            continue
        if same.draft != arm.draft or {*same.ks, *same.trees} & {*arm.ks, *arm.trees}:
            raise InvalidRequest(f"two arms are called {arm.name!r}; name them: NAME=DRAFT@K")
        ks = tuple(sorted({*same.ks, *arm.ks}))
        found[arm.name] = replace(same, ks=ks, trees=(*same.trees, *arm.trees))
    return tuple(found.values())


def _parse_arm(text: str) -> DraftArms:
    if text.rpartition("=")[2] == AUTO:
        text = f"{text}@{EngineConfig().num_speculative_tokens}"
    head, _, listed = text.rpartition("@")
    name, _, draft = head.rpartition("=")
    listed, has_tree, shape = listed.partition("tree:")
    trees = (Tree.parse(shape),) if has_tree else ()
    parts = listed.removesuffix(",").split(",") if listed or not trees else []
    try:
        ks = tuple(sorted({int(k) for k in parts}))
    except ValueError:
        ks, trees = (), ()
    if not draft or not (ks or trees) or (ks and ks[0] < 1):
        raise InvalidRequest(
            f"arm {text!r} is not [NAME=]DRAFT@K[,K...][,tree:NODES[,DEPTH,WIDTH]]; examples are "
            "zoo:code-2m@2,4, zoo:code-2m@tree:7 and auto"
        )
    if draft == AUTO and (trees or len(ks) > 1):
        raise InvalidRequest(f"arm {text!r}: auto chooses K by itself, up to one: auto or auto@K")
    name = name or PurePath(draft.removeprefix(PREFIX)).name
    return DraftArms(name=name, draft=draft, ks=ks, trees=trees)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """Settings of a comparison: target, arms, prompts, temperatures, batch sizes and time.

    Attributes:
        arms: drafts with their K and trees; plain decoding comes first without being named.
        controllers: one more arm each per draft, in which it chooses K up to the largest.
        temperatures: one cell of the result each; 0 is greedy.
        batches: prompts continued together; one cell each, for every temperature.
        num_blocks: most blocks per cell; fewer where prompts run out.
        num_threads: carry the passes; None takes the number plain decoding is fastest with.
    """

    target: str = PREFIX + "code-11m"
    arms: tuple[DraftArms, ...]
    controllers: tuple[ControllerName, ...] = ()
    temperatures: tuple[float, ...] = (0.0, 1.0)
    batches: tuple[int, ...] = (1,)
    num_blocks: int = 12
    max_tokens: int = 64
    max_context: int = 1024
    dtype: str = "auto"
    device: str = "auto"
    weights: WeightFormat = "auto"
    num_threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("temperatures", "batches"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise InvalidRequest(f"{name} is {list(values)}; it must name each value once")
        if min(self.temperatures) < 0:
            raise InvalidRequest(f"temperatures has {min(self.temperatures)}; 0 is the least")
        if min(self.batches) < 1:
            raise InvalidRequest(f"batches has {min(self.batches)}; it must be at least 1")
        if self.num_blocks < LEAST_BLOCKS:
            raise InvalidRequest(
                f"num_blocks is {self.num_blocks}; an interval needs {LEAST_BLOCKS}"
            )
        if self.max_tokens < 2:
            raise InvalidRequest(f"max_tokens is {self.max_tokens}; the first token times nothing")
        if self.num_threads is not None and self.num_threads < 1:
            raise InvalidRequest(f"num_threads is {self.num_threads}; it must be at least 1")

    @property
    def max_k(self) -> int:
        """Largest number of draft nodes of any arm: its K or the nodes of its tree."""
        return max((arm.max_nodes for arm in self.arms), default=0)

    @property
    def engine(self) -> EngineConfig:
        """Engine settings with room for the largest batch and K."""
        max_batch = max(SCOUT_BATCH, *self.batches)
        return EngineConfig(
            num_speculative_tokens=self.max_k,
            controller="fixed",
            max_batch=max_batch,
            max_context=self.max_context,
            max_step_rows=max(EngineConfig().max_step_rows, max_batch * (self.max_k + 1)),
            weights=self.weights,
            sharing="none",  # every arm reads its prompts
        )


SMALL_CHAT_MODEL = PREFIX + "smollm2-135m"
"""The target of the demonstration, from the package index."""
CHECKOUT_TARGET = PREFIX + "code-40m"
"""The target of the demonstration where no package index is reachable."""
DEMO_ARMS: Mapping[str, DraftArms] = MappingProxyType(
    {
        SMALL_CHAT_MODEL: DraftArms(name="self:int4", draft="self:int4", ks=(2,)),
        CHECKOUT_TARGET: DraftArms(name="EAGLE-3 head", draft="zoo:eagle3-for-40m", ks=(4,)),
    }
)
"""The draft that the demonstration uses for each target, with the fixed K that is compared."""


def demo_benches(target: str) -> dict[str, BenchConfig]:
    """Return the comparisons of the demonstration, by the name of their format of the weights."""
    bench = BenchConfig(
        target=target,
        arms=(DEMO_ARMS[target],),
        controllers=("auto",),
        num_blocks=DEMO_BLOCKS,
        max_tokens=96,
    )
    if target == SMALL_CHAT_MODEL:  # whose file has 4 bits
        return {"bf16": replace(bench, dtype="bfloat16"), "4 bits": bench}
    return {"bf16": bench, "4 bits": replace(bench, weights="int4")}
