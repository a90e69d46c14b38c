"""Recorded passes: shapes, padding, memory, and what a recording must not depend on."""

from __future__ import annotations

import logging

import pytest
import torch
from tests.recorders import Again, Starved, Traced, torch_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from forerun.models.base import Context, RowBatch, Span, pack
from forerun.models.runner.graphs.model import TorchModel
from forerun.models.runner.graphs.programs import GraphRecorder, disagreement, run_rectangle
from forerun.models.runner.graphs.rectangle import (
    Inputs,
    PassShape,
    ShapeLimits,
    pack_visible,
    shape_of,
    table_of,
)
from forerun.theory.tree import NO_TREE, TokenTree

VOCAB_SIZE = 40
LIMITS = ShapeLimits(num_sequences=12, num_keys=5000)


def model(recorder: GraphRecorder | None, device: str = "cpu") -> TorchModel:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    network = LlamaForCausalLM(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        parameter.normal_(0, 0.3, generator=generator)
    return torch_model(network, recorder, num_slots=8, device=device)


def batch_of(contexts: list[Context], tree: TokenTree = NO_TREE) -> RowBatch:
    """One pass over everything pending, with a tree of tokens 1, 2, ... after each."""
    spans = [context.span(context.num_pending, tree) for context in contexts]
    nodes = list(range(1, len(tree.parents) + 1))
    ids = [token for context in contexts for token in [*context.pending(), *nodes]]
    last, row = [], 0
    for span in spans:
        last.append(row + span.num_chain - 1)
        row += span.num_rows
    return pack(spans, torch.tensor(ids), last, torch.device("cpu"))


def span(num_chain: int, start: int = 0, parents: tuple[int, ...] = (), slot: int = 0) -> Span:
    return Span(slot=slot, start=start, num_chain=num_chain, tree=TokenTree(parents))


@pytest.mark.parametrize(
    ("spans", "num_wanted", "expected"),
    [
        ([span(1)], 1, (1, 1, 1, 512)),
        ([span(5)], 5, (1, 5, 5, 512)),
        ([span(9)], 9, (1, 12, 12, 512)),
        ([span(1), span(3), span(2), span(1), span(1)], 5, (6, 3, 6, 512)),
        ([span(1, start=511)], 1, (1, 1, 1, 512)),
        ([span(1, start=512)], 1, (1, 1, 1, 2048)),
        ([span(1, start=4000)], 1, (1, 1, 1, 5000)),
        ([span(1)] * 12, 12, (12, 1, 12, 512)),
    ],
)
def test_bucket_is_the_next_larger_shape(spans, num_wanted, expected):
    sequences, rows, wanted, keys = expected
    assert shape_of(spans, num_wanted, LIMITS) == PassShape(
        num_sequences=sequences, num_rows=rows, num_wanted=wanted, num_keys=keys
    )


@pytest.mark.parametrize(
    ("spans", "fits"),
    [
        ([span(64)], True),
        ([span(65)], False),
        ([span(1)] * 7 + [span(32)], True),
        ([span(1)] * 7 + [span(40)], False),
        ([span(12)] * 6 + [span(40)] * 2, False),
        ([span(14)] * 6 + [span(40)] * 2, True),
        ([span(64)] * 12, True),
        ([span(64)] * 17, False),
    ],
    ids=lambda value: "" if isinstance(value, bool) else str([s.num_rows for s in value]),
)
def test_no_bucket_for_long_or_very_ragged_passes(spans, fits):
    limits = ShapeLimits(num_sequences=32, num_keys=5000)
    assert (shape_of(spans, 1, limits) is not None) is fits


def test_bits_of_a_tree_are_its_ancestors_and_the_chain():
    bits = pack_visible(span(2, parents=(-1, -1, 0, 2)))
    assert bits == [0b1, 0b11, 0b111, 0b1011, 0b10111, 0b110111]


def test_the_64th_row_takes_the_sign():
    assert pack_visible(span(64))[-1] == -1
    assert pack_visible(span(1, parents=(-1,) * 63))[-1] == 1 - (1 << 63)


def test_padding_repeats_the_last_row_and_the_last_sequence():
    spans = [span(1, start=7, slot=3), span(2, start=4, slot=1), span(1, start=9, slot=0)]
    bucket = PassShape(num_sequences=4, num_rows=3, num_wanted=4, num_keys=512)
    table = torch.tensor(table_of(spans, bucket))
    place, source, index, visible = table[:48].view(4, 12).tolist()
    slot, start, end = table[48:].view(3, 4).tolist()
    assert place[:4] == [0, 3, 4, 6]
    assert source == [0, 0, 0, 1, 2, 2, 3, 3, 3, 3, 3, 3]
    assert index == [7, 7, 7, 4, 5, 5, 9, 9, 9, 9, 9, 9]
    assert visible == [1, 1, 1, 1, 3, 3, 1, 1, 1, 1, 1, 1]
    assert (slot, start, end) == ([3, 1, 0, 0], [7, 4, 9, 9], [8, 6, 10, 10])


def test_a_shape_is_recorded_once_and_said(caplog):
    recorder = Starved(100)
    ours = model(recorder)
    context = Context(ours.store, [1, 2, 3])
    with caplog.at_level(logging.INFO, "forerun"):
        for _ in range(3):
            ours.forward(batch_of([context]))
            ours.greedy_chain(batch_of([context]), 4, VOCAB_SIZE)
    assert recorder.num_asked == 2
    first, second = caplog.messages
    assert first.startswith("recorded passes of 1 x 3 rows over up to 192 keys in ")
    assert first.endswith("; other shapes follow when they are first met")
    assert caplog.records[0].name == "forerun.preparation"
    # All levels of a chain but the first are passes of one row.
    assert second.startswith("recorded passes of 1 x 1 rows")


@pytest.mark.parametrize("num_recordings", [0, 1])
def test_without_memory_passes_run_unrecorded(num_recordings, caplog):
    """A batch of 1, then of 2: the second shape finds no memory, or both do."""
    recorder = Starved(num_recordings)
    starved, unrecorded = model(recorder), model(None)
    results = []
    for ours in (starved, unrecorded):
        contexts = [Context(ours.store, [1, 2, 3])]
        logits = [ours.forward(batch_of(contexts)).logits]
        contexts.append(Context(ours.store, [4, 5, 6]))
        logits += [ours.forward(batch_of(contexts)).logits for _ in range(2)]
        chain = ours.greedy_chain(batch_of(contexts), 3, VOCAB_SIZE)
        results.append((torch.cat(logits), chain))
    torch.testing.assert_close(*(logits for logits, _ in results))
    assert torch.equal(*(chain for _, chain in results))
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].message.startswith("passes of ")
    assert "no memory to record them" in warnings[0].message
    # Every shape is asked for once: 1 x 3, 2 x 3, and the later levels of the chain, of one row.
    assert recorder.num_asked == 3


def test_the_first_failure_is_not_the_models():
    """What is no lack of memory is not swallowed."""

    class Broken(Again):
        def record(self, run):
            raise RuntimeError("not memory")

    ours = model(Broken())
    with pytest.raises(RuntimeError, match="not memory"):
        ours.forward(batch_of([Context(ours.store, [1])]))


def test_results_outlive_the_next_pass():
    ours = model(Traced())
    contexts = [Context(ours.store, [1, 2, 3]), Context(ours.store, [9, 8, 7])]
    first, second = batch_of(contexts[:1]), batch_of(contexts[1:])
    logits = ours.forward(first).logits
    chain = ours.greedy_chain(first, 3, VOCAB_SIZE)
    kept = logits.clone(), chain.clone()
    assert not torch.equal(ours.forward(second).logits, kept[0])
    assert not torch.equal(ours.greedy_chain(second, 3, VOCAB_SIZE), kept[1])
    assert torch.equal(logits, kept[0])
    assert torch.equal(chain, kept[1])


def test_padding_leaves_other_slots_alone():
    """Five sequences are padded to six, and the sixth must not touch a slot of its own."""
    ours = model(Again())
    bystander = Context(ours.store, [5, 6, 7])
    ours.forward(batch_of([bystander]))
    bystander.commit(range(3))
    before = ours.store.export_prefix(bystander.slot, 3).tensors[0]
    contexts = [Context(ours.store, [row + 1] * (row + 1)) for row in range(3)]
    ours.forward(batch_of(contexts, TokenTree((-1, 0))))
    ours.greedy_chain(batch_of(contexts), 5, VOCAB_SIZE)
    assert torch.equal(ours.store.export_prefix(bystander.slot, 3).tensors[0], before)


@pytest.mark.parametrize("recorder", [None, Again()], ids=["torch", "rectangles"])
def test_what_a_slot_held_before_cannot_spread(recorder):
    """A sequence whose KV became NaN leaves its slot to the next one."""
    ours = model(recorder)
    spoilt = Context(ours.store, [1] * 50)
    for view in ours.store.stage(spoilt.slot, 0, 50):
        view.fill_(float("nan"))
    spoilt.close()
    context = Context(ours.store, [1, 2, 3])
    assert ours.forward(batch_of([context], TokenTree((-1, -1)))).logits.isfinite().all()


def test_rows_are_refused_before_anything_is_launched():
    recorder = Starved(100)
    ours = model(recorder)
    context = Context(ours.store, [1, 2])
    late = Span(slot=context.slot, start=1, num_chain=1)
    batch = pack([late], torch.tensor([1]), [0], torch.device("cpu"))
    with pytest.raises(ValueError, match="must start between"):
        ours.forward(batch)
    with pytest.raises(ValueError, match="must start between"):
        ours.greedy_chain(batch, 2, VOCAB_SIZE)
    assert recorder.num_asked == 0


def test_tied_parameters_are_one_tensor_and_counted_once():
    ours = model(None)
    ends = ours.weights.ends
    assert ends.head is ends.embedding
    per_layer = 16 * (16 + 8 + 8) + 16 * 16 + 3 * 16 * 24 + 2 * 16
    assert ours.num_parameters == VOCAB_SIZE * 16 + 2 * per_layer + 16


class Crossings(TorchDispatchMode):
    """Notes every operation that touches memory of another device than `device`."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        if {tensor.device.type for tensor in tensors} - {self.device}:
            self.found.append(str(func))
        return result


def test_crossings_are_found():
    with Crossings("meta") as crossings:
        torch.ones(3, device="meta") * torch.tensor(2.0)
    assert crossings.found


@pytest.mark.parametrize("num_rows", [1, 5])
def test_nothing_in_a_recording_leaves_the_device(num_rows):
    """A graph can hold no copy from the host, and no wait for it. The device here has no memory."""
    ours = model(Again(), device="meta")
    bucket = PassShape(num_sequences=2, num_rows=num_rows, num_wanted=2, num_keys=192)
    inputs = Inputs(bucket, ours.device)
    with Crossings("meta") as crossings:
        logits = run_rectangle(ours.weights, ours.store, inputs)
    assert not crossings.found
    assert logits.shape == (2, VOCAB_SIZE)


class Wrong:
    """Records something near the truth, or far from it."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def record(self, run):
        return lambda: run() * self.factor


@pytest.mark.parametrize(("factor", "is_trusted"), [(1 + 1e-5, True), (1.01, False)])
def test_a_recording_that_computes_something_else_is_not_used(factor, is_trusted, caplog):
    ours, unrecorded = model(Wrong(factor)), model(None)
    for length in (1, 2, 1):
        batches = [batch_of([Context(m.store, [3] * length)]) for m in (ours, unrecorded)]
        logits, expected = ours.forward(batches[0]).logits, unrecorded.forward(batches[1]).logits
        assert torch.equal(logits, expected) is not is_trusted
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == (not is_trusted)
    assert is_trusted or "recorded they differ by 0.01 of their logits" in warnings[0]


def test_a_shape_first_met_without_logits_is_judged_when_they_come():
    ours = model(Wrong(2.0))
    context = Context(ours.store, [1, 2, 3])
    batch = batch_of([context])
    nothing = RowBatch(
        tokens=batch.tokens,
        positions=batch.positions,
        spans=batch.spans,
        logit_rows=batch.logit_rows[:0],
    )
    assert ours.forward(nothing).logits.shape == (0, VOCAB_SIZE)
    other = model(None)
    expected = other.forward(batch_of([Context(other.store, [1, 2, 3])])).logits
    assert torch.equal(ours.forward(batch).logits, expected)


def test_disagreement_is_of_the_worst_row_and_knows_nan():
    expected = torch.tensor([[3.0, 4.0], [torch.nan, 0.0], [6.0, 8.0]])
    actual = torch.tensor([[3.0, 4.0], [torch.nan, 0.0], [6.0, 9.0]])
    assert disagreement(actual, expected) == pytest.approx(0.1)
    assert disagreement(expected[1:2], expected[1:2]) == 0
    assert disagreement(expected[1:2], expected[:1]) == torch.inf


def test_rows_of_a_chain_see_those_before_in_a_rectangle():
    """A wrong table would be hidden by the comparison with the unrecorded pass."""
    assert pack_visible(Span(slot=0, start=5, num_chain=3)) == [0b1, 0b11, 0b111]
