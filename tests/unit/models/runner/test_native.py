"""The native runner at its limits: memory, sizes, and what it says of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.natives import decoder_of, random_parameters, run_natively

from forerun.errors import NotEnoughMemory, RunnerUnavailable
from forerun.models.base import Context, RowBatch, pack
from forerun.models.decoder import Decoder, Experts, parameter_shapes
from forerun.models.families import FAMILIES
from forerun.models.runner.native import NativeModel

SIZES = {
    "hidden_size": 32,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "intermediate_size": 24,
    "vocab_size": 61,
}


class Starved:
    """The kernels, but for one function that finds no memory."""

    def __init__(self, library: object, name: str) -> None:
        self.library, self.name = library, name

    def __getattr__(self, name: str) -> Callable[..., object]:
        found: Callable[..., object] = getattr(self.library, name)
        return (lambda *_: False) if name == self.name else found


def model_of(**changes: object) -> tuple[Decoder, NativeModel]:
    decoder = decoder_of(**(SIZES | changes))
    return decoder, run_natively(decoder, random_parameters(decoder))


def batch_of(context: Context) -> RowBatch:
    tokens = torch.tensor(context.pending())
    return pack([context.span(len(tokens))], tokens, [len(tokens) - 1], torch.device("cpu"))


@pytest.mark.parametrize("is_tied", [True, False])
def test_parameters_are_counted_once_and_packed_once(is_tied):
    decoder, model = model_of(tied=is_tied, qkv_bias=True)
    shapes = parameter_shapes(decoder)
    num_elements = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert model.num_parameters == num_elements
    padded_vocab = 64  # columns of a panel are computed together
    num_packed = num_elements + (padded_vocab - 61) * 32
    # Huge pages are 2 MiB: of so small a model there is one.
    assert num_packed * 4 <= model.weights.num_bytes <= 2 << 20


@pytest.mark.parametrize("num_rows", [15, 16, 23, 53])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_has_the_same_bits_alone_and_among_many(dtype, num_rows):
    decoder = decoder_of(**(SIZES | {"hidden_size": 160, "intermediate_size": 280}))
    model = run_natively(decoder, random_parameters(decoder), dtype=dtype)
    ids = torch.arange(num_rows) % decoder.architecture.vocab_size
    together, alone = (Context(model.store, ids.tolist()) for _ in range(2))
    rows = range(num_rows)
    expected = model.forward(pack([together.span(num_rows)], ids, rows, model.device)).logits
    for row in rows:
        batch = pack([alone.span(1)], ids[row : row + 1], [0], model.device)
        assert torch.equal(model.forward(batch).logits[0], expected[row])
        alone.commit(range(1))


def test_a_row_reads_only_the_experts_that_it_uses():
    variant = FAMILIES["Qwen3MoeForCausalLM"].variant
    experts = Experts(num_experts=64, num_used=2, intermediate_size=32, layers=(True, False))
    sizes = SIZES | {"hidden_size": 64, "intermediate_size": 32}
    decoder = replace(decoder_of(**sizes), variant=variant, experts=experts)
    model = run_natively(decoder, random_parameters(decoder))
    dense = expert = 3 * 64 * 32
    attention, router, head = 64 * 64 + 64 * 32, 64 * 64, 64 * 64
    read = 2 * attention + dense + router + head
    assert model.bytes_read == 4 * (read + 2 * expert)
    assert model.first_layers(1).bytes_read == model.bytes_read - 4 * (attention + dense)
    assert model.weights.num_bytes > 4 * (read + 64 * expert)


@pytest.mark.parametrize("function", ["forerun_decoder_forward", "forerun_decoder_greedy_chain"])
def test_a_pass_without_memory_says_what_to_lower(function, monkeypatch):
    _, model = model_of()
    context = Context(model.store, [1, 2, 3])
    batch = batch_of(context)
    kernels = model.weights.kernels
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "library", Starved(kernels.library, function))
        with pytest.raises(NotEnoughMemory, match=r"pass of 3 rows.*prefill_chunk.*max_batch"):
            if function.endswith("forward"):
                model.forward(batch)
            else:
                model.greedy_chain(batch, 2, 61)
    assert model.forward(batch).logits.isfinite().all()  # nothing is lost


def test_no_memory_for_the_weights_is_a_runner_that_is_not_there(monkeypatch):
    _, model = model_of()
    kernels = model.weights.kernels
    monkeypatch.setattr(kernels, "library", Starved(kernels.library, "forerun_decoder_new"))
    with pytest.raises(RunnerUnavailable, match="or memory is short"):
        model_of()


@pytest.mark.parametrize(
    "changes", [{"head_dim": 8}, {"head_dim": 272}, {"hidden_size": 36}], ids=str
)
def test_sizes_without_kernels_are_named(changes):
    (name, value) = next(iter(changes.items()))
    with pytest.raises(RunnerUnavailable, match=f"{name} {value}.*multiples of 16"):
        model_of(**changes)


def test_a_dtype_without_kernels_is_named():
    decoder = decoder_of(**SIZES)
    with pytest.raises(RunnerUnavailable, match=r"bf16 and fp32, not in torch\.float64"):
        run_natively(decoder, random_parameters(decoder), dtype=torch.float64)


def test_rows_that_do_not_fit_are_refused_before_the_kernels_see_them():
    _, model = model_of()
    context = Context(model.store, [1] * (model.max_context + 65))
    with pytest.raises(NotEnoughMemory, match="slot"):
        model.forward(batch_of(context))


def test_weights_are_freed_with_the_model():
    deleted = []
    _, model = model_of()
    library, handle = model.weights.kernels.library, model.weights.handle

    class Watched(Starved):
        def forerun_decoder_delete(self, given):
            deleted.append(given)
            library.forerun_decoder_delete(given)

    kernels = model.weights.kernels
    kernels.library = Watched(library, "nothing")
    del model
    kernels.library = library
    assert deleted == [handle]
