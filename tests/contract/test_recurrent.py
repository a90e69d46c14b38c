"""Models with recurrent layers: their states follow what is committed, whatever was drafted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests import tiny
from tests.contract.test_families import continued
from tests.contract.test_language_model import BRANCHED, BRANCHED_TOKENS
from tests.contract.test_more_families import MORE, RECURRENT, network

from forerun.control.base import Tree
from forerun.drafters.base import Drafter
from forerun.drafters.draft_model import SelfDraft
from forerun.drafters.recycling import RecyclingDrafter
from forerun.drafters.suffix import SuffixDrafter
from forerun.engine.config import RequestTerms
from forerun.errors import NotEnoughMemory
from forerun.models import huggingface, memory, recurrent
from forerun.models.base import Context, pack
from forerun.models.families import FAMILIES
from forerun.models.huggingface import HuggingFaceModel
from forerun.models.load import load_model
from forerun.models.recurrent import RecurrentStore, StackedStates
from forerun.sampling.config import SamplingParams
from forerun.theory.tree import NO_TREE

pytestmark = pytest.mark.usefixtures("unchecked")

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
TELLING = ("Lfm2", "Jamba", "NemotronH", "Qwen3_5")
PROMPTS = [tiny.tokenizer().encode(prompt) for prompt in tiny.PROMPTS]


@pytest.fixture(
    scope="module",
    params=[f if f in TELLING else pytest.param(f, marks=pytest.mark.full) for f in RECURRENT],
)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def made(family: str) -> Any:
    return network(family)


@pytest.fixture
def model(made: Any) -> HuggingFaceModel:
    return tiny.adapted(copy.deepcopy(made))


@pytest.fixture(scope="module")
def expected(made: Any) -> list[list[int]]:
    return [continued(made, ids, NUM_TOKENS) for ids in PROMPTS]


def texts(model: HuggingFaceModel, drafter: Drafter | None, **changes: Any) -> list[list[int]]:
    engine = tiny.engine_over(model, drafter, **changes)
    return [list(output.token_ids) for output in engine.generate(PROMPTS, GREEDY)]


DRAFTERS: dict[str, Callable[[HuggingFaceModel, Any], Drafter]] = {
    "suffix": lambda model, _: SuffixDrafter(),
    "recycling": lambda model, _: RecyclingDrafter(),
    "self": lambda model, _: SelfDraft(model.first_layers(2), model.vocab_size),
    "draft model": lambda _, made: tiny.drafting(tiny.adapted(copy.deepcopy(made))),
}


@pytest.mark.covering
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_leaves_the_text_alone(model, made, expected, name):
    drafter = DRAFTERS[name](model, made)
    assert texts(model, drafter, k=4) == expected
    assert texts(model, drafter, k=4, max_batch=2, prefill_chunk=7) == expected
    if name != "suffix":
        tree = Tree(num_nodes=7, depth=3, width=3)
        assert texts(model, drafter, k=3, tree=tree) == expected
    assert model.store.num_free == 4


def test_a_seed_decides_the_text_whatever_is_drafted(model, made):
    params = SamplingParams(temperature=0.8, max_tokens=NUM_TOKENS, seed=3, ignore_eos=True)

    def sampled(drafter: Drafter | None, **changes: Any) -> list[tuple[int, ...]]:
        engine = tiny.engine_over(model, drafter, **changes)
        return [output.token_ids for output in engine.generate(PROMPTS, params)]

    drafter = tiny.drafting(tiny.adapted(copy.deepcopy(made)))
    assert sampled(drafter, k=4) == sampled(None, k=0)


def test_a_preempted_sequence_is_read_again(model, made, expected):
    drafter = tiny.drafting(tiny.adapted(copy.deepcopy(made)))
    engine = tiny.engine_over(model, drafter, k=3, max_batch=2)
    ids = [engine.add_request(p, GREEDY, terms=RequestTerms(priority=5)) for p in PROMPTS[:2]]
    for _ in range(3):
        engine.step()
    ids.append(engine.add_request(PROMPTS[2], GREEDY, terms=RequestTerms(priority=0)))
    while engine.has_unfinished:
        engine.step()
    outputs = [engine.take_output(request_id) for request_id in ids]
    assert [list(output.token_ids) for output in outputs] == expected[:3]
    assert any(output.completions[0].num_preemptions for output in outputs)


def test_a_conversation_goes_on_from_the_kept_state(model, made):
    engine = tiny.engine_over(model, SuffixDrafter(), k=3, max_batch=1)
    (first,) = engine.generate([PROMPTS[0]], GREEDY)
    longer = [*PROMPTS[0], *first.token_ids, 5, 6, 7]
    (second,) = engine.generate([longer], GREEDY)
    assert list(second.token_ids) == continued(made, longer, NUM_TOKENS)
    # All but the last emitted token, which was never fed.
    held = len(PROMPTS[0]) + NUM_TOKENS - 1
    assert second.completions[0].num_cached_tokens == held
    shorter = longer[: len(PROMPTS[0]) + 2]
    (third,) = engine.generate([shorter], GREEDY)
    assert third.completions[0].num_cached_tokens == 0
    assert list(third.token_ids) == continued(made, shorter, NUM_TOKENS)


SYSTEM = [(7 * place) % 250 + 3 for place in range(41)]
CHATS = [[*SYSTEM, *ids[:9]] for ids in (*PROMPTS, PROMPTS[0][::-1])]


def chats(model: HuggingFaceModel, **changes: Any) -> list[tuple[int | None, list[int]]]:
    """Return how many tokens of every prompt were found, and the text after it."""
    engine = tiny.engine_over(model, SuffixDrafter(), k=3, **changes)
    outputs = [engine.generate([ids], GREEDY)[0] for ids in CHATS]
    return [(o.completions[0].num_cached_tokens, list(o.token_ids)) for o in outputs]


@pytest.mark.covering
@pytest.mark.parametrize("chunk", [512, 7, 32])
def test_a_shared_beginning_is_found_from_the_third_text_on(model, made, chunk):
    """The second text shows where texts part, and keeps the states there."""
    expected = [continued(made, ids, NUM_TOKENS) for ids in CHATS]
    for max_batch in (4, 1):
        found = chats(model, prefill_chunk=chunk, max_batch=max_batch)
        assert [text for _, text in found] == expected
        if max_batch == 4:
            assert [cached for cached, _ in found] == [0, 0] + [32] * (len(CHATS) - 2)
    together = tiny.engine_over(model, SuffixDrafter(), k=3, max_batch=4, prefill_chunk=chunk)
    assert [list(output.token_ids) for output in together.generate(CHATS, GREEDY)] == expected


def test_states_are_those_of_the_text_read_at_once(model):
    """After rejections, the committed state equals the state of the committed text alone."""
    store, ids = model.store, PROMPTS[0]
    assert isinstance(store, RecurrentStore)
    context = Context(store, list(ids), None)
    feed(model, context, len(ids))
    context.commit(range(len(ids)))
    context.ids.append(9)
    model.forward(pack([context.span(1, BRANCHED)], [9, *BRANCHED_TOKENS], [0], model.device))
    context.commit([0, 2])
    context.ids.append(BRANCHED_TOKENS[1])
    alone = Context(store, list(context.ids), None)
    feed(model, alone, len(alone.ids))
    alone.commit(range(len(alone.ids)))
    for layer, state in store._states[context.slot].items():
        for key, tensor in state.items():
            torch.testing.assert_close(
                tensor, store._states[alone.slot][layer][key], rtol=1e-4, atol=1e-5
            )


def held_bytes(states: Any) -> int:
    """Bytes of the memory that tensors are parts of, each counted once."""
    storages = (part.untyped_storage() for state in states for part in state.values())
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_take_the_bytes_counted_from_the_configuration(made, dtype):
    model = tiny.adapted(copy.deepcopy(made).to(dtype))
    store = model.store
    assert isinstance(store, RecurrentStore)
    geometry = store.geometry
    assert geometry.state_bytes
    contexts = [Context(store, list(ids), None) for ids in PROMPTS[:2]]
    for tree in (NO_TREE, BRANCHED):
        ends = [context.ids[context.num_cached :] for context in contexts]
        spans = [c.span(len(ids), tree) for c, ids in zip(contexts, ends, strict=True)]
        draft = BRANCHED_TOKENS if tree is BRANCHED else []
        tokens = [token for ids in ends for token in [*ids, *draft]]
        model.forward(pack(spans, tokens, [0], model.device))
        staged = [by_layer for slot in store._staged for by_layer in slot.values()]
        committed = [state for slot in store._states for state in slot.values()]
        held = held_bytes([*committed, *(state for row in staged for state in row.values())])
        rows = len(staged) + (2 if tree is BRANCHED else 0)
        assert rows * geometry.state_bytes <= held <= (rows + 4) * geometry.state_bytes
        assert rows <= 2 * (len(tree.parents) + 4)
        for context, ids in zip(contexts, ends, strict=True):
            context.commit(range(len(ids)))
            context.ids.append(5)
        committed = [state for slot in store._states for state in slot.values()]
        assert held_bytes(committed) == 2 * geometry.state_bytes


def test_states_that_do_not_fit_are_refused_before_the_weights_are_read(monkeypatch, tmp_path):
    network("Qwen3_5").save_pretrained(tmp_path)
    monkeypatch.setattr(huggingface, "read_weights", None)
    monkeypatch.setattr(memory, "available_bytes", lambda _: 1 << 20)
    # Per layer: 64 channels over 4 inputs, 4 heads of 8 by 8; three layers in fp32.
    needed = 3 * (64 * 4 + 4 * 8 * 8) * 4 * 8 * (64 + 4) / 2**20
    with pytest.raises(NotEnoughMemory, match=rf"recurrent states {needed:.1f} MiB \(6.0 KiB each"):
        load_model(tmp_path, max_context=10)


def test_samples_do_not_wait_for_a_prompt_they_cannot_share(model):
    engine = tiny.engine_over(model, None, k=0, max_batch=4, prefill_chunk=3)
    engine.add_request(PROMPTS[2], SamplingParams(n=3, max_tokens=2, seed=1))
    engine.step()
    assert engine.stats().num_running == 3


def feed(model: HuggingFaceModel, context: Context, num_rows: int) -> None:
    batch = pack([context.span(num_rows)], context.ids[:num_rows], [num_rows - 1], model.device)
    model.forward(batch)


def not_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every commit takes the state after the last staged row."""

    def commit(self: RecurrentStore, slot: int, rows: Any) -> None:
        staged = self._staged[slot]
        last = staged[max(staged)] if staged else {}
        right(self, slot, rows)
        self._states[slot] = last

    right = RecurrentStore.commit
    monkeypatch.setattr(RecurrentStore, "commit", commit)


def one_row_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def commit(self: RecurrentStore, slot: int, rows: Any) -> None:
        staged, start = self._staged[slot], self.length(slot)
        right(self, slot, rows)
        if rows:
            row = start + rows[-1]
            self._states[slot] = staged.get(row + 1, staged[row])

    right = RecurrentStore.commit
    monkeypatch.setattr(RecurrentStore, "commit", commit)


def convolution_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(self: StackedStates, index: int) -> Any:
        return {
            key: torch.zeros_like(tensor) if key[0] == "conv" else tensor
            for key, tensor in right(self, index).items()
        }

    right = StackedStates.of
    monkeypatch.setattr(StackedStates, "of", of)


def state_of_a_sibling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node starts from the state of the node before it in place of its parent's."""

    def schedule(spans: Any, due: Any) -> Any:
        return [
            [
                recurrent._Rows(
                    first=row.first,
                    num_rows=row.num_rows,
                    slot=row.slot,
                    start=row.start if row.num_rows > 1 else row.end,
                    end=row.end,
                )
            ]
            for row in sorted(
                (r for batch in right(spans, due) for r in batch), key=lambda r: r.first
            )
        ]

    right = recurrent._schedule
    monkeypatch.setattr(recurrent, "_schedule", schedule)


def snapshot_one_row_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot stands for one token more than it was taken after."""

    def commit(self: RecurrentStore, slot: int, rows: Any) -> None:
        awaited = slot in self.due
        right(self, slot, rows)
        if awaited and slot not in self.due:
            self._snapshot_lengths[slot] += 1

    right = RecurrentStore.commit
    monkeypatch.setattr(RecurrentStore, "commit", commit)


def snapshot_of_the_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def commit(self: RecurrentStore, slot: int, rows: Any) -> None:
        awaited = slot in self.due
        right(self, slot, rows)
        if awaited and slot not in self.due:
            self._snapshots[slot] = self._states[slot]

    right = RecurrentStore.commit
    monkeypatch.setattr(RecurrentStore, "commit", commit)


@pytest.mark.parametrize("plant", [snapshot_one_row_off, snapshot_of_the_last_row])
def test_wrong_snapshots_would_show(monkeypatch, plant):
    made = network("Qwen3_5")
    expected = [continued(made, ids, NUM_TOKENS) for ids in CHATS]
    plant(monkeypatch)
    found = chats(tiny.adapted(copy.deepcopy(made)))
    assert found[2][0]
    assert [text for _, text in found] != expected


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "plant", [not_rolled_back, one_row_too_far, convolution_forgotten, state_of_a_sibling]
)
def test_known_faults_would_show(monkeypatch, plant):
    made = network("Qwen3_5")
    expected = [continued(made, ids, NUM_TOKENS) for ids in PROMPTS]
    model = tiny.adapted(copy.deepcopy(made))
    drafter = DRAFTERS["self"](model, made)
    tree = Tree(num_nodes=7, depth=3, width=3)
    assert texts(model, drafter, k=3, tree=tree) == expected
    plant(monkeypatch)
    assert texts(model, drafter, k=3, tree=tree) != expected


def test_the_table_of_recurrent_families_is_whole():
    assert {f"{family}ForCausalLM" for family in RECURRENT} == {
        name for name, row in FAMILIES.items() if row.states is not None
    }
    assert RECURRENT.keys() <= MORE.keys()
