"""Runs the enumeration of every verifier on small models, and of verifiers with known bugs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal, get_args

import rich.table
import rich.text
import torch
from jaxtyping import Bool
from torch import Tensor

from forerun.doctor.exact.trees import (
    ChainRows,
    ChainVerifier,
    DrawnTrees,
    Emitted,
    Inexact,
    ModelPairs,
    Stage,
    Table,
    TreeVerifier,
    Walker,
    all_trees,
    certain_before,
    compare_with_plain,
    confident_before,
    emit_chains,
    emit_trees,
    emit_walks,
    engine_accept,
    engine_final,
    goodput_k,
    kernel_accept,
    kernel_final,
    kernel_weights,
    random_pairs,
    structured_pairs,
    without,
)
from forerun.drafters.foreign import restricted
from forerun.sampling.chain import Rule, prefix_ratios, residual_weights
from forerun.sampling.config import SamplingParams
from forerun.sampling.history import History, RowHistory, TokenMask
from forerun.sampling.kernels import sampling_kernels
from forerun.sampling.noise import Purpose, step_key
from forerun.sampling.processors import pack_params, target_probs
from forerun.sampling.tree_rules import TreeRule, TreeWeights, tree_weights
from forerun.theory.tree import TokenTree, expanded

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


FlawedMap = Literal["none", "not renormalised", "two draft tokens for one"]


def foreign_pairs(
    pairs: ModelPairs, generator: torch.Generator, flaw: FlawedMap = "none"
) -> ForeignPairs:
    """Give every draft two more tokens than the target has, and a random map between the two."""
    vocab_size = pairs.vocab_size
    order = torch.empty(vocab_size + 2).uniform_(generator=generator).argsort()
    columns, num_shared = order[:vocab_size], 1 + int(order[0]) % vocab_size
    is_missing = torch.arange(vocab_size) >= num_shared
    drawn, verified = [], []
    for rows in pairs.draft:
        logits = torch.empty(*rows.shape[:-1], vocab_size + 2, dtype=rows.dtype)
        logits.uniform_(-3, 0, generator=generator)[..., columns] = rows.clamp(min=1e-9).log()
        probs, own = logits.softmax(-1), restricted(logits, columns, is_missing).softmax(-1)
        drawn.append(own)
        if flaw == "not renormalised":
            verified.append(probs[..., columns] * ~is_missing)
        elif flaw == "two draft tokens for one":
            both = probs[..., columns] * ~is_missing
            both[..., 0] += probs[..., order[-1]]
            drawn[-1] = both / both.sum(-1, keepdim=True)
            verified.append(own)
        else:
            verified.append(own)
    return ForeignPairs(target=pairs.target, draft=tuple(drawn), verified=tuple(verified))


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


def _uncapped_accept(rows: ChainRows, rule: Rule) -> Tensor:
    """Bug: accept a block by the plain product of ratios instead of the capped product."""
    accept = engine_accept(rows, rule)
    nodes = rows.tokens[..., None]
    drawn = rows.draft[:, :-1].gather(-1, nodes).clamp(min=1e-50)  # drawn, hence positive
    product = (rows.target[:, :-1].gather(-1, nodes) / drawn)[..., 0].prod(-1)
    return torch.cat([accept[:, :-1], product.clamp(max=1)[:, None]], -1)


def _final_from_next_row(rows: ChainRows, accepted: Tensor, rule: Rule) -> Tensor:
    """Bug: take the residual from the row after the rejected token's row."""
    right = engine_final(rows, accepted, rule)
    chains = torch.arange(len(accepted))
    row = (accepted + 1).clamp(max=rows.target.shape[1] - 1)
    ratios = prefix_ratios(rows.target, rows.draft[:, :-1], rows.tokens, rows.num_drafted)
    ratio = ratios[chains, accepted] if rule == "block" else torch.ones_like(ratios[:, 0])
    wrong = residual_weights(rows.target[chains, row], rows.draft[chains, row], ratio)
    return torch.where((accepted < rows.num_drafted)[:, None], wrong, right)


def _bonus_from_draft(rows: ChainRows, accepted: Tensor, rule: Rule) -> Tensor:
    right = engine_final(rows, accepted, rule)
    draft_row = rows.draft[torch.arange(len(accepted)), accepted]
    return torch.where((accepted == rows.num_drafted)[:, None], draft_row, right)


def _position_draft_key(request_key: int, num_committed: int, node: int) -> int:
    return step_key(request_key, num_committed + node, 0, Purpose.DRAFT)


def _accept_draft_key(request_key: int, num_committed: int, node: int) -> int:
    return step_key(request_key, num_committed, node, Purpose.ACCEPT)


def _position_verify_keys(request_key: int, num_committed: int, num_nodes: int) -> list[int]:
    accept = [step_key(request_key, num_committed + i, 0, Purpose.ACCEPT) for i in range(num_nodes)]
    last = [step_key(request_key, num_committed, 0, p) for p in (Purpose.RECOVERED, Purpose.BONUS)]
    return accept + last


def _confident_after(draft_row: Tensor, drawn_prob: Tensor) -> Tensor:
    return drawn_prob >= 0.25


def _committed_only(history: History, path: tuple[int, ...]) -> RowHistory:
    return history.at()


def _masked_root_only(history: History, path: tuple[int, ...]) -> RowHistory:
    return RowHistory(base=history, path=path) if path else history.at()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedView:
    """History of a row with a deliberate bug, as the processors read it."""

    name: str
    shape: str
    view: View


def planted(
    name: str, *, rules: tuple[Rule, ...] = ("token", "block"), **replaced: Any
) -> tuple[str, tuple[ChainVerifier, ...]]:
    return name, tuple(ChainVerifier(rule=rule, **replaced) for rule in rules)


PLANTED = (
    planted("uncapped product", rules=("block",), accept=_uncapped_accept),
    planted("residual from the wrong row", final=_final_from_next_row),
    planted("bonus from the draft", final=_bonus_from_draft),
    planted("position-only draft noise", rules=("block",), draft_key=_position_draft_key),
    planted("position-only accept noise", rules=("block",), verify_keys=_position_verify_keys),
    planted("one noise for draft and acceptance", draft_key=_accept_draft_key),
    planted("drawn token dropped by its own probability", keep=_confident_after),
)

PLANTED_VIEWS = (
    PlantedView(
        name="penalty counts not extended along the path", shape="penalties", view=_committed_only
    ),
    PlantedView(name="mask not applied at draft nodes", shape="token mask", view=_masked_root_only),
)


PLANTED_TREE = TokenTree((-1, -1, 0, 0))
"""The topology the bugs are tried on: two siblings, the first of which has two children."""
SIBLINGS = (0, 1)
LOW = 0.3
"""Probability below which a bug drops a drawn node."""

LeftWeight = Callable[[Tensor, Tensor, Tensor], Tensor]


def _right_weight(mass: Tensor, weight: Tensor, draft: Tensor) -> Tensor:
    return mass / (mass + 1 - weight).clamp(min=1e-300)


def _mass_over_draft(mass: Tensor, weight: Tensor, draft: Tensor) -> Tensor:
    return mass / draft.sum(-1).clamp(min=1e-300)


def traversal(left: LeftWeight = _right_weight, *, keeps_drawn: bool = False) -> Stage:
    def stage(
        rule: TreeRule, tree: TokenTree, target: Tensor, draft: Tensor, tokens: Tensor
    ) -> TreeWeights:
        final, draft = target.clone(), draft.clone()
        rows = {parent: index for index, parent in enumerate(expanded(tree))}
        accept = torch.zeros_like(tokens, dtype=target.dtype)

        def visit(node: int, weight: Tensor) -> Tensor:
            for child in tree.children(node):
                row, token = draft[:, rows[node]], tokens[:, child, None]
                here = final[:, node + 1]
                ratio = here.gather(-1, token) / row.gather(-1, token).clamp(min=1e-300)
                accept[:, child] = visit(child, (weight * ratio[:, 0]).clamp(max=1)).clamp(max=1)
                residual = (weight[:, None] * here - row).clamp(min=0)
                mass = residual.sum(-1)
                kept = residual / mass.clamp(min=1e-300)[:, None]
                final[:, node + 1] = torch.where(mass[:, None] > 0, kept, here)
                weight = left(mass, weight, row.scatter(-1, token, 0.0)).clamp(max=1)
                if not keeps_drawn:
                    draft[:, rows[node]] = without(row, token[:, 0])
            return weight

        visit(-1, torch.ones_like(target[:, 0, 0]))
        return TreeWeights(accept=accept, final=final, shares=torch.zeros_like(accept))

    return stage


def _cut_by_own_probability(
    rule: TreeRule, tree: TokenTree, target: Tensor, draft: Tensor, tokens: Tensor
) -> TreeWeights:
    """Bug: drop the last node if the draft gave its token a low probability."""
    last = len(tree.parents) - 1
    row = expanded(tree).index(tree.parents[last])
    is_cut = (draft[:, row].gather(-1, tokens[:, last, None])[:, 0] < LOW)[:, None]
    whole = tree_weights(rule, tree, target, draft, tokens)
    smaller = TokenTree(tree.parents[:-1])
    kept = [expanded(tree).index(parent) for parent in expanded(smaller)]
    part = tree_weights(rule, smaller, target[:, :-1], draft[:, kept], tokens[:, :-1])
    accept = torch.nn.functional.pad(part.accept, (0, 1))
    final = torch.cat([part.final, target[:, -1:]], 1)
    return TreeWeights(
        accept=torch.where(is_cut, accept, whole.accept),
        final=torch.where(is_cut[..., None], final, whole.final),
        shares=whole.shares,
    )


def _of_another_request(
    rule: TreeRule, tree: TokenTree, target: Tensor, draft: Tensor, tokens: Tensor
) -> TreeWeights:
    flatter = target.sqrt()
    return tree_weights(rule, tree, flatter / flatter.sum(-1, keepdim=True), draft, tokens)


def _sorted_siblings(trees: DrawnTrees, tree: TokenTree) -> DrawnTrees:
    """Bug: order the first siblings by their probabilities instead of their draws."""
    index = {tuple(draft): place for place, draft in enumerate(trees.tokens.tolist())}
    first, second = SIBLINGS
    swapped = []
    for draft in trees.tokens.tolist():
        draft[first], draft[second] = draft[second], draft[first]
        swapped.append(index[tuple(draft)])
    root = trees.draft[..., 0, :]
    one, other = (
        root.gather(-1, trees.tokens[:, node].expand(root.shape[:-1])[..., None])[..., 0]
        for node in SIBLINGS
    )
    probs = torch.where(one >= other, trees.probs + trees.probs[..., swapped], 0.0)
    return replace(trees, probs=torch.where(one == other, trees.probs, probs))


def _most_likely_called_sampled(trees: DrawnTrees, tree: TokenTree) -> DrawnTrees:
    probs = torch.ones_like(trees.probs)
    for row, parent in enumerate(expanded(tree)):
        top = trees.draft[..., row, :].argsort(dim=-1, descending=True, stable=True)
        for rank, child in enumerate(tree.children(parent)):
            probs = probs * (top[..., rank] == trees.tokens[:, child])
    return replace(trees, probs=probs)


def _optimistic_positions(trees: DrawnTrees, tree: TokenTree) -> DrawnTrees:
    return replace(trees, target=trees.target.roll(-1, 3))


def _position_keys(
    request_key: int, num_committed: int, num_nodes: int
) -> tuple[list[int], list[int]]:
    """Bug: derive the keys of tests and final draws from the position alone."""
    tests = [step_key(request_key, num_committed + n, 0, Purpose.ACCEPT) for n in range(num_nodes)]
    finals = [
        step_key(request_key, num_committed + n, 0, Purpose.RECOVERED) for n in range(num_nodes + 1)
    ]
    return tests, finals


def plant_tree(name: str, *rules: TreeRule, **replaced: object) -> tuple[str, list[TreeVerifier]]:
    return name, [
        TreeVerifier(rule=rule, **replaced)  # type: ignore[arg-type]  # functions of its stages
        for rule in rules
    ]


PLANTED_TREES = (
    plant_tree(
        "tree: weight of a parent Z / sum Q", "traversal", stage=traversal(_mass_over_draft)
    ),
    plant_tree("tree: drawn token kept in Q", "traversal", stage=traversal(keeps_drawn=True)),
    plant_tree("tree: siblings sorted", "traversal", "rejection", damage=_sorted_siblings),
    plant_tree(
        "tree: node cut by its own probability",
        "traversal",
        "rejection",
        stage=_cut_by_own_probability,
    ),
    plant_tree(
        "tree: most likely tokens called sampled",
        "traversal",
        "rejection",
        damage=_most_likely_called_sampled,
    ),
    plant_tree(
        "tree: parameters of another request",
        "traversal",
        "rejection",
        "greedy_coupling",
        stage=_of_another_request,
    ),
    plant_tree(
        "tree: positions from an optimistic length",
        "traversal",
        "rejection",
        "greedy_coupling",
        damage=_optimistic_positions,
    ),
    plant_tree(
        "tree: position-only noise",
        "traversal",
        "rejection",
        "greedy_coupling",
        keys=_position_keys,
    ),
)


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


def render(report: ExactReport) -> rich.table.Table:
    """Render the report as a table for a terminal."""
    table = rich.table.Table(
        title="Total variation between emitted text and the target, two steps, fp64"
    )
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
            rich.text.Text(verdict, style="green" if found.ok else "bold red"),
        )
    table.add_section()
    for bug in report.planted:
        table.add_row(
            f"planted: {bug.name}",
            f"{bug.num_pairs:,}",
            "",
            f"{bug.worst_tv:.1e}",
            rich.text.Text(
                "caught" if bug.caught else "MISSED", style="green" if bug.caught else "bold red"
            ),
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
