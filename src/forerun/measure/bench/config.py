"""Settings of comparisons; torch-free, so that the command line can read them cheaply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from forerun.control.base import Tree
from forerun.control.config import ControllerName
from forerun.engine.config import EngineConfig
from forerun.errors import InvalidRequest
from forerun.models.architecture import Runner, WeightFormat
from forerun.models.catalog import PREFIX

AUTO = "auto"
"""The arm whose controller chooses among the drafts at hand."""
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
        if text in ("plain", "none"):
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
    runner: Runner = "auto"
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
            runner=self.runner,
            weights=self.weights,
            sharing="none",  # every arm reads its prompts
        )


DEMO_DRAFTS: Mapping[str, tuple[DraftArms, ...]] = {
    "zoo:code-40m": (
        DraftArms(
            name="domain draft",
            draft="zoo:code-2m-for-40m",
            ks=(2, 3, 4, 6),
            trees=(Tree(num_nodes=5, depth=3, width=2), Tree(num_nodes=8, depth=4, width=3)),
        ),
        DraftArms(
            name="attached head",
            draft="zoo:eagle3-for-40m",
            ks=(3, 4, 5, 6),
            trees=(Tree(num_nodes=6, depth=4, width=2),),
        ),
    ),
    "zoo:code-11m": (DraftArms(name="domain draft", draft="zoo:code-2m", ks=(1, 2, 3, 4)),),
}
"""Drafts that the demonstration compares on each shipped target.

Of each draft, the best K and the best tree are shown.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Settings of the demonstration: the drafts to compare, and the time budget.

    Attributes:
        seconds: from the start of the command to the end of the last measurement, as far as the
            least number of prompts allows.
        min_tokens: shortest `max_tokens` a slow machine is given.
        general: a draft trained on other text than the target, with its K.
        drafts: drafts made for the target, each with the K and the trees to choose from; the text
            of the first is checked, at its largest K.
        copied_k: tokens copied from the prompt per step where the prompt asks for an edit.
        num_calibration: prompts set aside for the choice of K.
        max_batch: sequences decoded at once where nothing is timed.
        num_threads: carry the passes; None takes the number plain decoding is fastest with.
    """

    seconds: float = 80.0
    max_tokens: int = 96
    min_tokens: int = 24
    target: str = "zoo:code-40m"
    general: DraftArms = DraftArms(name="off-the-shelf", draft="zoo:books-1m", ks=(10,))
    drafts: tuple[DraftArms, ...] = DEMO_DRAFTS["zoo:code-40m"]
    copied_k: int = 16
    num_calibration: int = 12
    num_exact: int = 3
    exact_tokens: int = 32
    max_batch: int = SCOUT_BATCH
    max_context: int = 1024
    runner: Runner = "auto"
    num_threads: int | None = None

    def __post_init__(self) -> None:
        if not self.drafts:
            raise InvalidRequest("drafts is empty; the demonstration needs a draft to compare")
        if self.num_threads is not None and self.num_threads < 1:
            raise InvalidRequest(f"num_threads is {self.num_threads}; it must be at least 1")

    @property
    def models(self) -> tuple[str, ...]:
        return (self.target, self.general.draft, *(arm.draft for arm in self.drafts))

    @property
    def engine(self) -> EngineConfig:
        """Engine settings with room for the largest K."""
        nodes = (arm.max_nodes for arm in (self.general, *self.drafts))
        most = max(self.copied_k, *nodes)
        return EngineConfig(
            num_speculative_tokens=most,
            controller="fixed",
            max_batch=self.max_batch,
            max_context=self.max_context,
            runner=self.runner,
            sharing="none",  # every arm reads its prompts
        )
