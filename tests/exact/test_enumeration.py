"""The suite passes on the engine's functions, and has teeth."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import StringIO

import pytest
import torch
from rich.console import Console
from tests.exact.planted import PLANTED, PLANTED_MAPS, PLANTED_VIEWS, PlantedView

from forerun.doctor.exact import run, trees
from forerun.doctor.exact.run import (
    SHAPES,
    DraftRows,
    ExactReport,
    VerifierResult,
    foreign_pairs,
    render,
    renormalised,
    run_enumeration,
    shaped_pairs,
)
from forerun.doctor.exact.trees import (
    ChainVerifier,
    Inexact,
    ModelPairs,
    Walker,
    compare_with_plain,
    confident_before,
    emit_chains,
    emit_walks,
    goodput_k,
    random_pairs,
    structured_pairs,
    walk_table,
)
from forerun.sampling.noise import position_key
from forerun.sampling.walk import walk
from forerun.theory.tree import TokenTree

TREE = TokenTree((-1, -1, 0))


def some_pairs(
    vocab_size: int = 3, horizon: int = 5, num_pairs: int = 16, seed: int = 1
) -> ModelPairs:
    generator = torch.Generator().manual_seed(seed)
    return next(random_pairs(num_pairs, vocab_size, horizon, generator))


def worst_tv(joint: torch.Tensor, pairs: ModelPairs) -> float:
    return float((joint - pairs.joint()).abs().sum(-1).max() / 2)


@pytest.fixture(scope="module")
def told() -> list[str]:
    return []


@pytest.fixture(scope="module")
def report(told: list[str]) -> ExactReport:
    return run_enumeration(num_pairs=24, seed=7, progress=told.append)


def test_every_verifier_is_exact(report: ExactReport) -> None:
    assert report.ok
    assert all(v.worst_tv <= 1e-12 for v in report.verifiers)
    assert all(v.num_histories > 0 for v in report.verifiers)
    assert all(v.num_pairs >= (5 if shaped(v.name) else 24) for v in report.verifiers)
    names = {v.name for v in report.verifiers}
    assert {f"{rule}, {shape}" for rule in ("token", "block", "walk") for shape in SHAPES} <= names
    assert {"token", "block", "walk, deterministic tree", "coupled, any draft"} <= names
    adaptive = {f"{rule}, K of a controller, drafts that end early" for rule in ("token", "block")}
    assert adaptive <= names


def test_the_controller_between_two_steps_adapts() -> None:
    assert [goodput_k(3, accepted) for accepted in range(4)] == [1, 2, 3, 3]


def shaped(name: str) -> bool:
    return name.rpartition(", ")[2] in SHAPES


def test_the_report_goes_to_json_and_terminal(report: ExactReport) -> None:
    data = json.loads(json.dumps(report.to_dict()))
    assert data["ok"] is True
    assert len(data["verifiers"]) == len(report.verifiers)
    assert {"name", "num_pairs", "num_histories", "worst_tv", "ok"} <= set(data["verifiers"][0])
    console = Console(width=100, record=True, file=StringIO())
    console.print(render(report))
    text = console.export_text()
    assert "walk, sampled chain" in text
    assert "NOT EXACT" not in text


def test_a_biased_verifier_fails_the_report() -> None:
    good = VerifierResult(name="a", num_pairs=1, num_histories=1, worst_tv=1e-15)
    biased = VerifierResult(name="b", num_pairs=1, num_histories=1, worst_tv=2e-12, detail="why")
    assert ExactReport(seed=0, verifiers=(good,)).ok
    assert not ExactReport(seed=0, verifiers=(good, biased)).ok
    console = Console(width=100, record=True, file=StringIO())
    console.print(render(ExactReport(seed=0, verifiers=(biased,))))
    assert "NOT EXACT why" in console.export_text()


def test_the_number_of_threads_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[int] = []

    def nothing(*_: object) -> Iterator[VerifierResult]:
        inside.append(torch.get_num_threads())
        return iter(())

    monkeypatch.setattr(run, "_check_verifiers", nothing)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run_enumeration()
        assert (inside, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


def test_progress_names_every_part(report: ExactReport, told: list[str]) -> None:
    assert told == [v.name for v in report.verifiers]


@pytest.mark.parametrize(("name", "verifiers"), PLANTED, ids=[name for name, _ in PLANTED])
def test_each_planted_bug_biases_random_pairs(
    name: str, verifiers: tuple[ChainVerifier, ...]
) -> None:
    pairs = some_pairs(num_pairs=32)
    if "noise" in name:
        for verifier in verifiers:
            with pytest.raises(Inexact, match="a noise key decides twice"):
                emit_chains(pairs, verifier, 2)
        return
    worst = max(worst_tv(emit_chains(pairs, verifier, 2).joint, pairs) for verifier in verifiers)
    assert worst > 1e-3, name


@pytest.mark.parametrize("bug", PLANTED_VIEWS, ids=lambda bug: bug.name)
@pytest.mark.parametrize("rule", ["token", "block"])
def test_each_bug_in_what_rows_know_biases_random_pairs(bug: PlantedView, rule: str) -> None:
    pairs = shaped_pairs(some_pairs(), SHAPES[bug.shape], 2, bug.view)
    assert worst_tv(emit_chains(pairs, ChainVerifier(rule=rule), 2).joint, pairs) > 1e-3
    walked = shaped_pairs(some_pairs(), SHAPES[bug.shape], 2, bug.view)
    assert worst_tv(emit_walks(walked, Walker(), TREE).joint, walked) > 1e-3


@pytest.mark.parametrize("flawed", PLANTED_MAPS)
def test_each_bug_in_the_map_of_vocabularies_biases_random_pairs(flawed: DraftRows) -> None:
    def tv_of(draft_rows: DraftRows) -> float:
        generator = torch.Generator().manual_seed(2)
        pairs = foreign_pairs(some_pairs(num_pairs=32), generator, draft_rows)
        return worst_tv(emit_chains(pairs, ChainVerifier(rule="block"), 2).joint, pairs)

    assert tv_of(renormalised) <= 1e-12
    assert tv_of(flawed) > 1e-3


@pytest.mark.parametrize("name", SHAPES)
def test_the_text_shapes_the_pairs(name: str) -> None:
    """Otherwise the shaped rows of the report would test nothing new."""
    pairs = some_pairs(num_pairs=4)
    shaped = shaped_pairs(pairs, SHAPES[name], 2)
    assert all(
        not torch.equal(*rows) for rows in zip(shaped.target[1:], pairs.target[1:], strict=True)
    )
    for level, rows in enumerate(shaped.target):
        torch.testing.assert_close(shaped.target_rows(level, 0), rows, rtol=0, atol=1e-14)
    # A drafted token counts like a committed one, except past what a mask forbids.
    assert torch.equal(shaped.target_rows(1, 1)[:, 1], shaped.target_rows(2, 0)[:, 1])


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(("vocab_size", "num_drafts"), [(2, 3), (4, 1), (5, 2)])
def test_other_sizes_are_exact_too(rule: str, vocab_size: int, num_drafts: int) -> None:
    pairs = some_pairs(vocab_size, num_drafts + 3, num_pairs=4)
    for verifier in (ChainVerifier(rule=rule), ChainVerifier(rule=rule, keep=confident_before)):
        assert worst_tv(emit_chains(pairs, verifier, num_drafts).joint, pairs) <= 1e-12


def test_drafts_that_end_early_are_ragged() -> None:
    """Otherwise their rows of the report would test nothing new."""
    rows = some_pairs().draft[0][:, 0]
    assert 0 < confident_before(rows, rows[..., 0]).double().mean() < 1


def test_structured_pairs_are_what_they_say() -> None:
    pairs = structured_pairs(3, 2, torch.Generator().manual_seed(0))
    for target, draft in zip(pairs.target, pairs.draft, strict=True):
        for rows in (target, draft):
            torch.testing.assert_close(rows.sum(-1), torch.ones_like(rows[..., 0]))
        assert torch.equal(target[0], draft[0])
        assert ((target[1] > 0).sum(-1) == 1).all()
        assert ((draft[2] > 0).sum(-1) == 1).all()
        assert (target[4] * draft[4] == 0).all()
        assert (target[5] * draft[5] == 0).all()
        assert (target[6] == 0).any()


# ---------------------------------------------------------------------------------- teeth: the walk


def sloppy_walk(
    tree: TokenTree, drafts: tuple[int, ...], draws: tuple[int, ...]
) -> tuple[tuple[int, ...], int]:
    """Accepts the first node unseen."""
    return (0,), draws[1]


def peeking_walk(
    tree: TokenTree, drafts: tuple[int, ...], draws: tuple[int, ...]
) -> tuple[tuple[int, ...], int]:
    """Stops early when the last row's draw is 0."""
    return ((), draws[0]) if draws[-1] == 0 else walk(tree, drafts, draws)


def test_a_walk_that_emits_what_was_not_drawn_is_found_out() -> None:
    with pytest.raises(Inexact, match="not what the target drew"):
        walk_table(sloppy_walk, TREE, 3)


def test_a_walk_that_looks_elsewhere_is_found_out() -> None:
    with pytest.raises(Inexact, match="rows it did not visit"):
        walk_table(peeking_walk, TREE, 3)


def test_target_noise_keyed_by_depth_alone_is_found_out() -> None:
    def keys(request_key: int, num_committed: int, tree: TokenTree) -> list[int]:
        return [position_key(request_key, depth) for depth in (0, *tree.depths)]

    with pytest.raises(Inexact, match="decided something before"):
        emit_walks(some_pairs(), Walker(keys=keys), TREE)


def test_target_noise_shared_with_the_drafts_is_found_out() -> None:
    def keys(request_key: int, num_committed: int, tree: TokenTree) -> list[int]:
        draft_key = ChainVerifier(rule="token").draft_key
        return [draft_key(request_key, num_committed, depth) for depth in (0, *tree.depths)]

    with pytest.raises(Inexact, match="decided something before"):
        emit_walks(some_pairs(), Walker(keys=keys, sampled=True), TokenTree.chain(2))


def test_a_wrong_walk_distribution_would_show() -> None:
    """The walk's distribution is compared with the target's, not assumed: try another."""
    pairs = some_pairs()
    other = ModelPairs(target=pairs.draft, draft=pairs.draft)
    assert worst_tv(emit_walks(other, Walker(), TREE).joint, pairs) > 1e-3


# ------------------------------------------------------------------------------ teeth: the coupling


def test_coupled_steps_equal_plain_decoding() -> None:
    compared, different = compare_with_plain(some_pairs(num_pairs=3), TREE, range(3))
    assert compared == 3 * 3 * 3 * 27
    assert different == 0


def test_coupling_with_keys_of_the_step_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys(request_key: int, num_committed: int, tree: TokenTree) -> list[int]:
        return [position_key(request_key, num_committed + 7 * d) for d in (0, *tree.depths)]

    monkeypatch.setattr(trees, "target_keys", keys)
    _, different = compare_with_plain(some_pairs(num_pairs=3), TREE, range(3))
    assert different > 0
