"""Runs the enumeration of every verifier on small models, and of verifiers with known bugs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import get_args

import torch
from rich.table import Table
from rich.text import Text

from forerun.sampling.chain import Rule
from forerun.sampling.history import History
from forerun.sampling.kernels import sampling_kernels
from forerun.sampling.tree_rules import TreeRule
from forerun.testing.exact.chains import (
    ChainVerifier,
    Emitted,
    certain_before,
    confident_before,
    emit_chains,
    kernel_accept,
    kernel_final,
)
from forerun.testing.exact.pairs import Inexact, ModelPairs, random_pairs, structured_pairs
from forerun.testing.exact.plants import (
    PLANTED,
    PLANTED_TREE,
    PLANTED_TREES,
    PLANTED_VIEWS,
    SHAPES,
    FlawedMap,
    Shape,
    View,
    foreign_pairs,
    shaped_pairs,
)
from forerun.testing.exact.trees import TreeVerifier, all_trees, emit_trees, kernel_weights
from forerun.testing.exact.walks import Walker, compare_with_plain, emit_walks, goodput_k
from forerun.theory.tree import TokenTree

TOLERANCE = 1e-12
"""Largest total variation an exact verifier may show in fp64."""
BIAS_CAUGHT = 1e-6
"""Total variation from which a planted bug counts as caught: far above rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierResult:
    """Result of the enumeration for one verifier of the engine.

    Attributes:
        num_histories: possible histories summed over, all pairs together; steps for `coupled`.
        worst_tv: largest total variation to the target's joint distribution; for `coupled`, the
            share of steps that differ from plain decoding.
    """

    name: str
    num_pairs: int
    num_histories: int
    worst_tv: float
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.worst_tv <= TOLERANCE


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedResult:
    """Result of the enumeration for one deliberate bug."""

    name: str
    num_pairs: int
    worst_tv: float

    @property
    def caught(self) -> bool:
        return self.worst_tv > BIAS_CAUGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactReport:
    """Results of `run_enumeration`."""

    seed: int
    verifiers: tuple[VerifierResult, ...]
    planted: tuple[PlantedResult, ...]

    @property
    def ok(self) -> bool:
        return all(v.ok for v in self.verifiers) and all(p.caught for p in self.planted)

    def to_dict(self) -> dict[str, object]:
        return {
            "seed": self.seed,
            "tolerance": TOLERANCE,
            "ok": self.ok,
            "verifiers": [asdict(v) | {"ok": v.ok} for v in self.verifiers],
            "planted": [asdict(p) | {"caught": p.caught} for p in self.planted],
        }


def render(report: ExactReport) -> Table:
    """Render the report as a table for a terminal."""
    table = Table(title="Total variation between emitted text and the target, two steps, fp64")
    table.add_column("verifier or planted bug")
    for heading in ("pairs", "histories", "worst TV"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    for found in report.verifiers:
        verdict = "exact" if found.ok else f"NOT EXACT {found.detail}".rstrip()
        table.add_row(
            found.name,
            f"{found.num_pairs:,}",
            f"{found.num_histories:,}",
            f"{found.worst_tv:.1e}",
            Text(verdict, style="green" if found.ok else "bold red"),
        )
    table.add_section()
    for bug in report.planted:
        table.add_row(
            f"planted: {bug.name}",
            f"{bug.num_pairs:,}",
            "",
            f"{bug.worst_tv:.1e}",
            Text("caught" if bug.caught else "MISSED", style="green" if bug.caught else "bold red"),
        )
    return table


Progress = Callable[[str], None]
Emit = Callable[[ModelPairs, TokenTree], Emitted]
PairSets = Iterator[tuple[ModelPairs, TokenTree]]
NUM_PLANTED_PAIRS = 64
SHAPED_SHARE = 5
"""Pairs shaped by the text are computed row by row, so there is one for so many others."""
NUM_COUPLED_SEEDS = 2
PAIRS_PER_MAP = 10
"""Pairs of models that share one random map between the vocabularies of target and draft."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Sizes of one enumeration, with a horizon that allows two complete steps."""

    vocab_size: int
    tree: TokenTree
    horizon: int


CHAINS = (
    Setting(vocab_size=3, tree=TokenTree.chain(1), horizon=4),
    Setting(vocab_size=3, tree=TokenTree.chain(2), horizon=5),
    Setting(vocab_size=3, tree=TokenTree.chain(3), horizon=6),
    Setting(vocab_size=4, tree=TokenTree.chain(2), horizon=5),
)
TREES = (
    Setting(vocab_size=3, tree=TokenTree((-1, -1, 0, 0)), horizon=5),
    Setting(vocab_size=3, tree=TokenTree((-1, -1, 1, 2)), horizon=6),
    Setting(vocab_size=4, tree=TokenTree((-1, -1, 0)), horizon=5),
)
SECOND_TREE = TokenTree((-1, -1))
MAX_TREE_DEPTH = 3


def run_enumeration(
    num_pairs: int = 500, seed: int = 0, progress: Progress | None = None
) -> ExactReport:
    """Enumerate the output distributions of the engine's verifiers and of those with bugs.

    Every verifier meets `num_pairs` random pairs, spread over vocabularies of 3 and 4 tokens and
    proposals of depth 1 to 3, and eight structured ones of each size; a fifth as many
    distributions are shaped by penalties and by a mask. Two consecutive steps, all drafts, all
    acceptance outcomes, the noise symbolic under the engine's real keys.
    """
    tell = progress or (lambda name: None)
    with _one_thread():
        return ExactReport(
            seed=seed,
            verifiers=tuple(_check_verifiers(num_pairs, seed, tell)),
            planted=(*_check_planted(seed, tell), *_check_planted_trees(seed, tell)),
        )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one torch thread in the block, which is faster for these small tensors."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _check_verifiers(num_pairs: int, seed: int, tell: Progress) -> Iterator[VerifierResult]:
    for name, settings, emit in _verifiers():
        tell(name)
        yield _check(name, emit, _pair_sets(settings, num_pairs, seed))
    for shape in SHAPES:
        for rule, settings, emit in _shaped_verifiers():
            tell(f"{rule}, {shape}")
            sets = _shaped_sets(settings, -(-num_pairs // SHAPED_SHARE), seed, SHAPES[shape])
            yield _check(f"{rule}, {shape}", emit, sets)
    for rule in get_args(Rule):
        name = f"{rule}, draft with another vocabulary"
        tell(name)
        yield _check(name, _chains(ChainVerifier(rule=rule)), _foreign_sets(num_pairs, seed))
    for name, verifier in _tree_verifiers():
        tell(name)
        yield _check(name, _trees(verifier), _tree_sets(num_pairs, seed))
    tell("coupled, any draft")
    yield _check_coupled(_pair_sets(CHAINS[1:2] + TREES[2:], num_pairs, seed))


def _check_planted(seed: int, tell: Progress) -> Iterator[PlantedResult]:
    for name, flawed in PLANTED:
        tell(f"planted: {name}")
        found = [
            _check(name, _chains(verifier), _pair_sets(CHAINS[1:], NUM_PLANTED_PAIRS, seed))
            for verifier in flawed
        ]
        worst = max(result.worst_tv for result in found)
        yield PlantedResult(name=name, num_pairs=found[0].num_pairs, worst_tv=worst)
    for bug in PLANTED_VIEWS:
        tell(f"planted: {bug.name}")
        sets = _shaped_sets(CHAINS[1:2], NUM_PLANTED_PAIRS, seed, SHAPES[bug.shape], bug.view)
        result = _check(bug.name, _chains(ChainVerifier(rule="block")), sets)
        yield PlantedResult(name=bug.name, num_pairs=result.num_pairs, worst_tv=result.worst_tv)

    for flaw in get_args(FlawedMap)[1:]:
        name = f"draft with another vocabulary, {flaw}"
        tell(f"planted: {name}")
        sets = _foreign_sets(NUM_PLANTED_PAIRS, seed, flaw)
        result = _check(name, _chains(ChainVerifier(rule="block")), sets)
        yield PlantedResult(name=name, num_pairs=result.num_pairs, worst_tv=result.worst_tv)


def _check_planted_trees(seed: int, tell: Progress) -> Iterator[PlantedResult]:
    tree = PLANTED_TREE
    settings = (Setting(vocab_size=3, tree=tree, horizon=horizon_of(tree)),)
    for name, flawed in PLANTED_TREES:
        tell(f"planted: {name}")
        found = [
            _check(name, _trees(verifier), _pair_sets(settings, NUM_PLANTED_PAIRS, seed, full=True))
            for verifier in flawed
        ]
        worst = min(result.worst_tv for result in found)  # every rule must show it
        yield PlantedResult(name=name, num_pairs=found[0].num_pairs, worst_tv=worst)


def _verifiers() -> Iterator[tuple[str, tuple[Setting, ...], Emit]]:
    for rule in get_args(Rule):
        yield rule, CHAINS, _chains(ChainVerifier(rule=rule))
    for rule in get_args(Rule) if sampling_kernels() else ():
        verifier = ChainVerifier(rule=rule, accept=kernel_accept, final=kernel_final)
        yield f"{rule}, CPU kernels", CHAINS, _chains(verifier)
    for rule in get_args(Rule):
        verifier = ChainVerifier(rule=rule, keep=confident_before)
        yield f"{rule}, stop rule before the draw", CHAINS, _chains(verifier)
    for rule in get_args(Rule):
        verifier = ChainVerifier(rule=rule, keep=certain_before, next_k=goodput_k)
        yield f"{rule}, K and stop rule of a controller", CHAINS, _chains(verifier)
    yield "walk, deterministic chain", CHAINS, _walks(Walker())
    yield "walk, deterministic tree", TREES, _walks(Walker())
    yield "walk, sampled chain", CHAINS, _walks(Walker(sampled=True))


def _tree_verifiers() -> Iterator[tuple[str, TreeVerifier]]:
    for rule in get_args(TreeRule):
        yield f"{rule}, trees", TreeVerifier(rule=rule)
    if sampling_kernels():
        verifier = TreeVerifier(rule="traversal", stage=kernel_weights)
        yield "traversal, trees, CPU kernels", verifier


def _shaped_verifiers() -> Iterator[tuple[str, tuple[Setting, ...], Emit]]:
    for rule in get_args(Rule):
        yield rule, CHAINS[1:2], _chains(ChainVerifier(rule=rule))
    yield "walk", TREES[2:], _walks(Walker())


def _chains(verifier: ChainVerifier) -> Emit:
    return lambda pairs, tree: emit_chains(pairs, verifier, len(tree.parents))


def _trees(verifier: TreeVerifier) -> Emit:
    return lambda pairs, tree: emit_trees(pairs, verifier, tree, SECOND_TREE)


def horizon_of(tree: TokenTree) -> int:
    return max(tree.depths) + 1 + max(SECOND_TREE.depths) + 1


def _tree_sets(num_pairs: int, seed: int) -> PairSets:
    """Return pairs for all topologies of up to 4 nodes over 3 tokens, and 3 nodes over 4 tokens."""
    settings = tuple(
        Setting(vocab_size=vocab_size, tree=tree, horizon=horizon_of(tree))
        for vocab_size, max_nodes in ((3, 4), (4, 3))
        for tree in all_trees(max_nodes, MAX_TREE_DEPTH, 3)
    )
    return _pair_sets(settings, max(num_pairs, len(settings)), seed, full=True)


def _walks(walker: Walker) -> Emit:
    return lambda pairs, tree: emit_walks(pairs, walker, tree)


def _pair_sets(
    settings: tuple[Setting, ...], num_pairs: int, seed: int, *, full: bool = False
) -> PairSets:
    generator = torch.Generator().manual_seed(seed)
    for index, setting in enumerate(settings):
        sizes = (setting.vocab_size, setting.horizon)
        share = (num_pairs + index) // len(settings)
        for pairs in random_pairs(share, *sizes, generator):
            yield pairs, setting.tree
        structured = structured_pairs(*sizes, generator)
        yield structured.with_full_drafts() if full else structured, setting.tree


def _shaped_sets(
    settings: tuple[Setting, ...], num_pairs: int, seed: int, shape: Shape, view: View = History.at
) -> PairSets:
    generator = torch.Generator().manual_seed(seed)
    for index, setting in enumerate(settings):
        share = (num_pairs + index) // len(settings)
        for pairs in random_pairs(share, setting.vocab_size, setting.horizon, generator):
            yield shaped_pairs(pairs, shape, max(setting.tree.depths), view), setting.tree


def _foreign_sets(num_pairs: int, seed: int, flaw: FlawedMap = "none") -> PairSets:
    """Return `num_pairs` random pairs, a random map of the vocabularies for every few of them."""
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, num_pairs, PAIRS_PER_MAP):
        share = min(PAIRS_PER_MAP, num_pairs - start)
        setting = CHAINS[1 + 2 * (start // PAIRS_PER_MAP % 2)]
        for pairs in random_pairs(share, setting.vocab_size, setting.horizon, generator):
            yield foreign_pairs(pairs, generator, flaw), setting.tree


def _check(name: str, emit: Emit, sets: PairSets) -> VerifierResult:
    num_pairs = num_histories = 0
    worst, detail = 0.0, ""
    for pairs, tree in sets:
        num_pairs += pairs.num_pairs
        try:
            emitted = emit(pairs, tree)
        except Inexact as error:
            worst, detail = 1.0, str(error)
            continue
        num_histories += emitted.num_histories
        tv = (emitted.joint - pairs.joint()).abs().sum(-1) / 2
        worst = max(worst, float(tv.nan_to_num(1.0).max()))
    return VerifierResult(
        name=name, num_pairs=num_pairs, num_histories=num_histories, worst_tv=worst, detail=detail
    )


def _check_coupled(sets: PairSets) -> VerifierResult:
    num_pairs = num_compared = num_different = 0
    for pairs, tree in sets:
        compared, different = compare_with_plain(pairs, tree, range(NUM_COUPLED_SEEDS))
        num_pairs += pairs.num_pairs
        num_compared += compared
        num_different += different
    return VerifierResult(
        name="coupled, any draft",
        num_pairs=num_pairs,
        num_histories=num_compared,
        worst_tv=num_different / num_compared,
        detail="differs from plain decoding" if num_different else "",
    )
