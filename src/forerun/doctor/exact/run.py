"""Runs the enumeration of every verifier on small models; tests run it with planted bugs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import get_args

import rich.table
import rich.text
import torch
from jaxtyping import Bool
from torch import Tensor

from forerun.doctor.exact.trees import (
    ChainVerifier,
    Emitted,
    Inexact,
    ModelPairs,
    Table,
    TreeVerifier,
    Walker,
    all_trees,
    compare_with_plain,
    confident_before,
    emit_chains,
    emit_trees,
    emit_walks,
    goodput_k,
    kernel_accept,
    kernel_final,
    kernel_weights,
    random_pairs,
    structured_pairs,
)
from forerun.drafters.foreign import restricted
from forerun.sampling.chain import Rule
from forerun.sampling.config import SamplingParams
from forerun.sampling.history import History, RowHistory, TokenMask
from forerun.sampling.kernels import sampling_kernels
from forerun.sampling.processors import pack_params, target_probs
from forerun.theory.tree import TokenTree

Text = tuple[int, ...]
View = Callable[[History, Text], RowHistory]
"""The history of a row, from the committed one and the draft tokens above the row."""

PROMPT = (0, 0, 1)
OFFSET = 1.5
"""Added to log-probabilities, so that logits of both signs meet the repetition penalty."""


class NoRepeats:
    """Token mask that forbids repeating the previous token."""

    def __init__(self, vocab_size: int, last: int | None = None) -> None:
        self.vocab_size = vocab_size
        self.last = last

    def fork(self) -> NoRepeats:
        return NoRepeats(self.vocab_size, self.last)

    def advance(self, token: int) -> None:
        self.last = token

    def allowed(self) -> Bool[Tensor, " vocab"]:
        row = torch.ones(self.vocab_size, dtype=torch.bool)
        if self.last is not None:
            row[self.last] = False
        return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Penalties and masks that change a distribution depending on the text so far.

    Attributes:
        define: logits of one prefix, (pairs, vocab), and the output so far to shaped ones.
        mask: a mask at the beginning of the output, from the size of the vocabulary.
    """

    params: SamplingParams
    define: Callable[[Tensor, Text], Tensor]
    mask: Callable[[int], TokenMask] | None = None


def penalised(params: SamplingParams, logits: Tensor, output: Text) -> Tensor:
    """Apply penalties: repetition over prompt and output, frequency and presence over output."""
    logits = logits.clone()
    times = Counter(output)
    for token in {*PROMPT, *output}:
        column = logits[:, token]
        worse = column * params.repetition_penalty
        logits[:, token] = torch.where(column < 0, worse, column / params.repetition_penalty)
    for token in set(output):
        logits[:, token] -= params.frequency_penalty * times[token] + params.presence_penalty
    return logits


def _without_repeats(logits: Tensor, output: Text) -> Tensor:
    logits = logits.clone()
    if output:
        logits[:, output[-1]] = -torch.inf
    return logits


# Every number is exact in fp32, as which parameters reach the processors.
PENALTIES = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.75, presence_penalty=0.5)
SHAPES: Mapping[str, Shape] = {
    "penalties": Shape(params=PENALTIES, define=partial(penalised, PENALTIES)),
    "token mask": Shape(params=SamplingParams(), define=_without_repeats, mask=NoRepeats),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShapedPairs(ModelPairs):
    """Pairs whose target rows the engine's processors compute with penalties and masks."""

    seen: Mapping[tuple[int, int], Tensor]

    def target_rows(self, num_committed: int, depth: int) -> Tensor:
        """Return the rows of the engine's processors, `depth` nodes past the committed text."""
        return self.seen[num_committed, depth]


def shaped_pairs(
    pairs: ModelPairs, shape: Shape, max_depth: int, view: View = History.at
) -> ShapedPairs:
    """Apply penalties and masks to the target of every pair; the draft is unchanged."""
    vocab_size = pairs.vocab_size
    logits = [rows.log() + OFFSET for rows in pairs.target]
    texts = [list(product(range(vocab_size), repeat=level)) for level in range(pairs.horizon)]
    target = tuple(
        torch.stack([shape.define(rows[:, i], text) for i, text in enumerate(of_level)], 1)
        for rows, of_level in zip(logits, texts, strict=True)
    )
    return ShapedPairs(
        target=tuple(rows.softmax(-1) for rows in target),
        draft=pairs.draft,
        seen={
            (level - depth, depth): _seen_rows(logits[level], texts[level], depth, shape, view)
            for level in range(pairs.horizon)
            for depth in range(min(level, max_depth) + 1)
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForeignPairs(ModelPairs):
    """Pairs whose drafts have another vocabulary, drafting the tokens that both have."""

    verified: Table

    def draft_rows(self, num_committed: int, depth: int) -> Tensor:
        return self.verified[num_committed + depth]


DraftRows = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Rows that tokens are drawn from and rows that are verified, of a draft with another vocabulary:
from its logits, the column of every token of the target, and which of these are missing."""


def renormalised(logits: Tensor, columns: Tensor, is_missing: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of a draft that draws the shared tokens alone."""
    rows = restricted(logits, columns, is_missing).softmax(-1)
    return rows, rows


def foreign_pairs(
    pairs: ModelPairs, generator: torch.Generator, draft_rows: DraftRows = renormalised
) -> ForeignPairs:
    """Give every draft two more tokens than the target has, and a random map between the two."""
    vocab_size = pairs.vocab_size
    order = torch.empty(vocab_size + 2).uniform_(generator=generator).argsort()
    columns, num_shared = order[:vocab_size], 1 + int(order[0]) % vocab_size
    is_missing = torch.arange(vocab_size) >= num_shared
    found = []
    for rows in pairs.draft:
        logits = torch.empty(*rows.shape[:-1], vocab_size + 2, dtype=rows.dtype)
        logits.uniform_(-3, 0, generator=generator)[..., columns] = rows.clamp(min=1e-9).log()
        found.append(draft_rows(logits, columns, is_missing))
    drawn, verified = zip(*found, strict=True)
    return ForeignPairs(target=pairs.target, draft=drawn, verified=verified)


def _seen_rows(logits: Tensor, texts: list[Text], depth: int, shape: Shape, view: View) -> Tensor:
    """Return the engine's rows after `texts`, whose last `depth` tokens are drafted."""
    num_pairs, num_texts, vocab_size = logits.shape
    bases: dict[Text, History] = {}
    histories: list[RowHistory | None] = []
    for text in texts:
        committed, path = text[: len(text) - depth], text[len(text) - depth :]
        if committed not in bases:
            bases[committed] = _history_after(committed, shape, vocab_size)
        histories += [view(bases[committed], path)] * num_pairs
    rows = logits.transpose(0, 1).flatten(0, 1)
    packed = pack_params([shape.params], rows=[0] * len(rows))
    found = target_probs(rows, packed, histories)
    return found.view(num_texts, num_pairs, vocab_size).transpose(0, 1)


def _history_after(committed: Text, shape: Shape, vocab_size: int) -> History:
    mask = None if shape.mask is None else shape.mask(vocab_size)
    history = History.of(shape.params, PROMPT, vocab_size=vocab_size, mask=mask)
    for token in committed:
        history.append(token)
    return history


TOLERANCE = 1e-12
"""Largest total variation an exact verifier may show in fp64."""


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
class ExactReport:
    """Results of `run_enumeration`."""

    seed: int
    verifiers: tuple[VerifierResult, ...]

    @property
    def ok(self) -> bool:
        return all(v.ok for v in self.verifiers)

    def to_dict(self) -> dict[str, object]:
        return {
            "seed": self.seed,
            "tolerance": TOLERANCE,
            "ok": self.ok,
            "verifiers": [asdict(v) | {"ok": v.ok} for v in self.verifiers],
        }


def render(report: ExactReport) -> rich.table.Table:
    """Render the report as a table for a terminal."""
    table = rich.table.Table(
        title="Total variation between emitted text and the target, two steps, fp64"
    )
    table.add_column("verifier")
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
            rich.text.Text(verdict, style="green" if found.ok else "bold red"),
        )
    return table


Progress = Callable[[str], None]
Emit = Callable[[ModelPairs, TokenTree], Emitted]
PairSets = Iterator[tuple[ModelPairs, TokenTree]]
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
    """Enumerate the output distributions of the engine's verifiers.

    Every verifier meets `num_pairs` random pairs, spread over vocabularies of 3 and 4 tokens and
    proposals of depth 1 to 3, and eight structured ones of each size; a fifth as many
    distributions are shaped by penalties and by a mask. Two consecutive steps, all drafts, all
    acceptance outcomes, and a check that no noise key of the engine decides twice.
    """
    tell = progress or (lambda name: None)
    with _one_thread():
        return ExactReport(seed=seed, verifiers=tuple(_check_verifiers(num_pairs, seed, tell)))


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
        for rule, setting, emit in _shaped_verifiers():
            tell(f"{rule}, {shape}")
            sets = _shaped_sets(setting, -(-num_pairs // SHAPED_SHARE), seed, SHAPES[shape])
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


def _verifiers() -> Iterator[tuple[str, tuple[Setting, ...], Emit]]:
    for rule in get_args(Rule):
        yield rule, CHAINS, _chains(ChainVerifier(rule=rule))
    for rule in get_args(Rule) if sampling_kernels() else ():
        verifier = ChainVerifier(rule=rule, accept=kernel_accept, final=kernel_final)
        yield f"{rule}, CPU kernels", CHAINS, _chains(verifier)
    for rule in get_args(Rule):
        verifier = ChainVerifier(rule=rule, keep=confident_before, next_k=goodput_k)
        yield f"{rule}, K of a controller, drafts that end early", CHAINS, _chains(verifier)
    yield "walk, deterministic chain", CHAINS, _walks(Walker())
    yield "walk, deterministic tree", TREES, _walks(Walker())
    yield "walk, sampled chain", CHAINS, _walks(Walker(sampled=True))


def _tree_verifiers() -> Iterator[tuple[str, TreeVerifier]]:
    yield "traversal, trees", TreeVerifier()
    if sampling_kernels():
        yield "traversal, trees, CPU kernels", TreeVerifier(stage=kernel_weights)


def _shaped_verifiers() -> Iterator[tuple[str, Setting, Emit]]:
    for rule in get_args(Rule):
        yield rule, CHAINS[1], _chains(ChainVerifier(rule=rule))
    yield "walk", TREES[2], _walks(Walker())


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


def _shaped_sets(setting: Setting, num_pairs: int, seed: int, shape: Shape) -> PairSets:
    generator = torch.Generator().manual_seed(seed)
    for pairs in random_pairs(num_pairs, setting.vocab_size, setting.horizon, generator):
        yield shaped_pairs(pairs, shape, max(setting.tree.depths)), setting.tree


def _foreign_sets(num_pairs: int, seed: int) -> PairSets:
    """Return `num_pairs` random pairs, a random map of the vocabularies for every few of them."""
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, num_pairs, PAIRS_PER_MAP):
        share = min(PAIRS_PER_MAP, num_pairs - start)
        setting = CHAINS[1 + 2 * (start // PAIRS_PER_MAP % 2)]
        for pairs in random_pairs(share, setting.vocab_size, setting.horizon, generator):
            yield foreign_pairs(pairs, generator), setting.tree


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
