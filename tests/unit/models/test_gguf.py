"""GGUF files: the same numbers as the gguf package's, the same text, and clear refusals."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from tests import tiny
from tests.gguf_files import (
    SCALE_PLACES,
    add_byte_tokenizer,
    add_tokenizer,
    all_of,
    dequantised,
    gguf_name,
    interleaved,
    random_blocks,
    write_gguf,
)
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig

from forerun.engine.engine import Engine
from forerun.errors import InvalidModel, NotEnoughMemory
from forerun.models import memory
from forerun.models.base import LanguageModel
from forerun.models.catalog import held_out_prompts, zoo_path
from forerun.models.checkpoint import ModelFiles
from forerun.models.decoder import QuantisedMatrix
from forerun.models.draft_card import identify
from forerun.models.gguf.file import TYPES, GGUFFile
from forerun.models.load import count_kept_bytes, load_model
from forerun.sampling.config import SamplingParams

HEADS = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}
SMALL = (Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1)
"""Types of blocks of 32 that are kept without rounding."""
KINDS = (Kind.F32, Kind.F16, Kind.BF16, *SMALL, *SCALE_PLACES)
KEPT = {
    Kind.Q8_0: 8.5,
    Kind.Q4_0: 4.5,
    Kind.Q4_1: 5,
    Kind.Q5_0: 8.5,
    Kind.Q5_1: 9,
    Kind.Q4_K: 5,
    Kind.Q5_K: 9,
    Kind.Q6_K: 9,
}
"""Bits of a weight in the packed form of a type."""
IDS = [5, 9, 2, 7, 30, 1, 4, 4, 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random Llama with rows of whole blocks of 256 and the tokenizer of the zoo."""
    place = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 30000.0},
    )
    network = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in network.named_parameters():
        parameter.data.normal_(float("norm" in name), 0.1, generator=generator)
    network.save_pretrained(place)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (place / file).write_bytes((zoo_path("zoo:code-40m") / file).read_bytes())
    return place


def written(folder: Path, place: Path, kind: Kind) -> Path:
    weights = load_file(folder / "model.safetensors")
    blocks = {
        name: random_blocks(tuple(tensor.shape), kind, seed)
        for seed, (name, tensor) in enumerate(weights.items())
        if kind in SCALE_PLACES and "norm" not in name
    }
    return write_gguf(place / f"{kind.name}.gguf", folder, all_of(kind), blocks=blocks)


def reference(folder: Path, path: Path) -> dict[str, Tensor]:
    """Parameters as the gguf package dequantises them, with rows back in transformers' order."""
    stored, found = dequantised(path), {}
    for name in load_file(folder / "model.safetensors"):
        values = stored[gguf_name(name)]
        for part, num_heads in HEADS.items():
            if part in name:
                # The inverse is found by interleaving the numbers of the rows.
                order = interleaved(np.arange(len(values)), num_heads)
                values = values[torch.from_numpy(np.argsort(order))]
        found[name] = values
    return found


def logits_of(model: LanguageModel) -> Tensor:
    return tiny.logits_of(model, IDS)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_tensors_are_those_of_the_gguf_package_to_the_bit(folder, tmp_path, kind):
    path = written(folder, tmp_path, kind)
    file = GGUFFile(path)
    for name, expected in reference(folder, path).items():
        assert torch.equal(file.read(name), expected), name
        if file.groups(name) is not None:
            assert kind in KEPT
            found = in_floating_point(file.quantised(name))
            if kind in SMALL:
                assert torch.equal(found, expected)
            else:  # scales and minima are each rounded to fp16
                matrix = file.quantised(name)
                sizes = in_floating_point(
                    QuantisedMatrix(*(None if part is None else part.abs() for part in matrix))
                )
                assert ((found - expected).abs() <= 2**-11 * sizes * 1.001).all()


def in_floating_point(matrix: QuantisedMatrix) -> Tensor:
    groups = matrix.values.float().reshape(*matrix.scales.shape, -1)
    groups = groups * matrix.scales.float()[..., None]
    if matrix.minima is not None:
        groups = groups + matrix.minima.float()[..., None]
    return groups.flatten(1)


def test_what_is_rounded_widened_or_dequantised_is_said(folder, tmp_path, caplog):
    kinds = {"q_proj": Kind.Q4_K, "up_proj": Kind.Q5_0, "down_proj": Kind.IQ4_NL}
    shapes = {name: tuple(t.shape) for name, t in load_file(folder / "model.safetensors").items()}

    def choose(name: str) -> Kind:
        return next((kind for part, kind in kinds.items() if part in name), Kind.Q5_0)

    blocks = {
        name: random_blocks(shape, choose(name))
        for name, shape in shapes.items()
        if choose(name) in SCALE_PLACES
    }
    path = write_gguf(
        tmp_path / "x.gguf",
        folder,
        lambda name: Kind.F32 if "norm" in name else choose(name),
        blocks=blocks,
    )
    with caplog.at_level("INFO", "forerun.preparation"):
        load_model(path, device="cpu", max_batch=1, num_threads=1)
    assert "scales of Q4_K are rounded to fp16" in caplog.text
    assert "Q5_0 takes 8.5 bits" in caplog.text
    assert "IQ4_NL is dequantised" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO", "forerun.preparation"):
        load_model(path, dtype="float32", device="cpu", max_batch=1, num_threads=1)
        load_model(written(folder, tmp_path, Kind.Q4_1), device="cpu", max_batch=1, num_threads=1)
    assert "rounded" not in caplog.text and "takes" not in caplog.text


def test_every_type_of_the_package_is_read_to_the_bit(tmp_path):
    """Of any bytes: scales that are no numbers included."""
    assert {*TYPES} == {"F32", "F16", *(kind.name for kind in gguf.quants._type_traits)}
    generator = np.random.default_rng(0)
    for name in TYPES:
        kind = Kind[name]
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        raw = generator.integers(0, 256, (3, 512 // per_block * block_bytes), dtype=np.uint8)
        writer = gguf.GGUFWriter(tmp_path / f"{name}.gguf", "llama")
        stored = raw.view({"F32": np.float32, "F16": np.float16}.get(name, np.uint8))
        writer.add_tensor("token_embd.weight", stored, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        found = GGUFFile(tmp_path / f"{name}.gguf").read("model.embed_tokens.weight").numpy()
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(found, gguf.dequantize(stored, kind), err_msg=name)


def test_matrices_of_several_types_are_packed_in_what_holds_them_all(folder, tmp_path):
    """Queries, keys and values are one matrix, and files often have values in more bits."""
    kinds = {
        "q_proj": Kind.Q4_0,
        "k_proj": Kind.Q4_1,
        "v_proj": Kind.Q6_K,
        "gate_proj": Kind.Q4_0,
        "up_proj": Kind.Q4_1,
        "o_proj": Kind.Q5_0,
        "down_proj": Kind.Q5_1,
    }

    def choose(name: str) -> Kind:
        return next((kind for part, kind in kinds.items() if part in name), Kind.F32)

    shapes = {name: t.shape for name, t in load_file(folder / "model.safetensors").items()}
    blocks = {
        name: random_blocks(tuple(shape), Kind.Q6_K)
        for name, shape in shapes.items()
        if "v_proj" in name
    }
    path = write_gguf(tmp_path / "mixed.gguf", folder, choose, blocks=blocks)
    options = {"device": "cpu", "max_batch": 1, "num_threads": 1}
    expected = logits_of(load_model(path, dtype="float32", **options))
    model = load_model(path, **options)
    found = logits_of(model).float()
    error = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 0.04
    matrices = 256 * (512 * 10 + 256 * 8.5 + 1024 * 5 + 512 * 9)  # qkv, output, gate and up, down
    head = 8192 * 256 * 16
    assert model.bytes_read == (2 * matrices + head) / 8


def test_experts_are_packed_as_they_are(tmp_path):
    """Each expert as the part of one tensor that it is in the file."""
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=3,
        max_position_embeddings=64,
    )
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_expert_count(3)
    writer.add_expert_used_count(2)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    add_byte_tokenizer(writer)
    generator = np.random.default_rng(0)
    shapes = {
        "token_embd": (256, 64),
        "output": (256, 64),
        "blk.0.attn_q": (64, 64),
        "blk.0.attn_k": (32, 64),
        "blk.0.attn_v": (32, 64),
        "blk.0.attn_output": (64, 64),
        "blk.0.ffn_gate_exps": (3, 96, 64),
        "blk.0.ffn_up_exps": (3, 96, 64),
        "blk.0.ffn_down_exps": (3, 64, 96),
    }
    for name, shape in shapes.items():
        values = generator.normal(0, 0.1, shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quantize(values, Kind.Q4_1), raw_dtype=Kind.Q4_1)
    router = generator.normal(0, 1, (3, 64)).astype(np.float32)
    writer.add_tensor("blk.0.ffn_gate_inp.weight", router)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    options = {"device": "cpu", "max_batch": 1, "num_threads": 1}
    expected = logits_of(load_model(tmp_path / "x.gguf", dtype="float32", **options))
    model = load_model(tmp_path / "x.gguf", **options)
    found = logits_of(model).float()
    error = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 0.04
    packed = 64 * (256 + 128 + 64) + 2 * (3 * 96 * 64)  # of the experts the two that are used
    assert model.bytes_read >= packed * 5 / 8
    assert model.bytes_read < (packed + 64 * 64) * 5 / 8 + 64 * 64 * 2  # the router in panels of 64


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_logits_are_those_of_the_dequantised_model(folder, tmp_path, kind):
    """In fp32 up to rounding; as loaded by default, up to that of the activations."""
    path = written(folder, tmp_path, kind)
    network = LlamaForCausalLM.from_pretrained(folder)
    network.load_state_dict(reference(folder, path))
    expected = network(torch.tensor([IDS])).logits[0].detach()
    options = {"device": "cpu", "max_batch": 1, "num_threads": 1}
    exact = logits_of(load_model(path, dtype="float32", **options))
    torch.testing.assert_close(exact, expected, atol=1e-3, rtol=1e-3)
    found = logits_of(load_model(path, **options)).float()
    error = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    # Activations are rounded to 8 bits beside packed blocks, and to bf16 beside the others.
    assert error < (0.04 if kind in KEPT else 0.02)


@pytest.mark.parametrize("kind", KEPT, ids=lambda kind: kind.name)
def test_blocks_are_packed_as_they_are_and_their_memory_is_counted(folder, tmp_path, kind):
    path = written(folder, tmp_path, kind)
    model = load_model(path, device="cpu", max_batch=1, num_threads=1)
    bits = KEPT[kind]
    embedding = 8192 * 256
    assert model.bytes_read == (model.num_parameters - embedding - 5 * 256) * bits / 8
    expected = count_kept_bytes(ModelFiles.open(path).weights, 2, is_tied=False)
    assert abs(model.weights.num_bytes - expected) <= 2 << 20  # whole huge pages


def test_memory_is_refused_before_weights_are_read(folder, tmp_path, monkeypatch):
    path = written(folder, tmp_path, Kind.Q8_0)
    monkeypatch.setattr(memory, "available_bytes", lambda _: 1 << 20)
    monkeypatch.setattr(GGUFFile, "_bytes", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(NotEnoughMemory, match=r"Q8_0\.gguf needs"):
        load_model(path, device="cpu")


@pytest.fixture(scope="module", params=[Kind.Q8_0, Kind.Q4_1], ids=lambda kind: kind.name)
def zoo_file(request, tmp_path_factory) -> Path:
    """The shipped target in few bits, its embedding, which is its head too, included."""
    place = tmp_path_factory.mktemp("zoo") / "code-2m.gguf"
    return write_gguf(place, zoo_path("zoo:code-2m-for-40m"), all_of(request.param))


def test_the_tokenizer_of_the_file_is_the_one_of_the_folder(zoo_file):
    ours, theirs = (
        ModelFiles.find(zoo_file).tokenizer,
        ModelFiles.find("zoo:code-2m-for-40m").tokenizer,
    )
    texts = [prompt.text for prompt in held_out_prompts()[:8]] + ["é 🙂  \n\tx<|endoftext|>"]
    assert [ours.encode(text) for text in texts] == [theirs.encode(text) for text in texts]
    assert ours.vocabulary == theirs.vocabulary
    assert ours.eos_token_id == theirs.eos_token_id
    ids = theirs.encode(texts[0])
    assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_with_drafts_is_that_of_the_file_alone(zoo_file, temperature):
    """As target with its own copy in 4 bits, and with itself as a draft model; batched."""
    prompts = [prompt.text for prompt in held_out_prompts()[:3]]
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=7)
    plain = Engine.load(zoo_file, device="cpu", num_threads=1, num_speculative_tokens=3)
    expected = [output.text for output in plain.generate(prompts, params)]
    for draft in ("self:int4", zoo_file):
        engine = plain.with_draft(draft)
        assert [output.text for output in engine.generate(prompts, params)] == expected
    assert any(expected)


def test_the_draft_of_a_folder_may_be_a_file(zoo_file):
    params = SamplingParams(max_tokens=16, temperature=0)
    plain = Engine.load("zoo:code-2m-for-40m", device="cpu", num_threads=1)
    engine = plain.with_draft(zoo_file, 3)
    assert engine.generate("def f(", params)[0].text == plain.generate("def f(", params)[0].text


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0], ids=lambda kind: kind.name)
def test_logits_of_a_trained_model_are_within_a_hundredth(tmp_path, kind):
    """Unlike the random model's, its roundings do not grow from layer to layer."""
    path = write_gguf(tmp_path / "trained.gguf", zoo_path("zoo:code-40m"), all_of(kind))
    ids = ModelFiles.find("zoo:code-40m").tokenizer.encode(held_out_prompts()[0].text)[:48]
    options = {"device": "cpu", "max_batch": 1, "max_context": 64, "num_threads": 1}
    expected = tiny.logits_of(load_model(path, dtype="float32", **options), ids)
    found = tiny.logits_of(load_model(path, **options), ids)
    error = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert 1e-3 < error < 1e-2  # the lower bound: activations were rounded


@pytest.mark.one_in(2)
def test_a_second_start_imports_neither_transformers_nor_a_compiler(zoo_file):
    load_model(zoo_file, device="cpu", max_batch=1, num_threads=1)  # the first one fills the cache
    program = (
        "import sys; from forerun.models.load import load_model; "
        f"load_model({str(zoo_file)!r}, device='cpu', max_batch=1, num_threads=1); "
        "sys.exit('transformers' in sys.modules or 'torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_identity_follows_every_part_of_the_file(zoo_file, tmp_path):
    copy = tmp_path / "copy.gguf"
    content = bytearray(zoo_file.read_bytes())
    copy.write_bytes(content)
    assert identify(copy) == identify(zoo_file)
    content[-1] ^= 1
    copy.write_bytes(content)
    assert identify(copy).tokenizer == identify(zoo_file).tokenizer


def header(num_tensors: int, num_entries: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries) + rest


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


LLAMA = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")


def entry(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return (
        text(name)
        + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        + struct.pack("<IQ", kind, offset)
    )


HOSTILE = {
    "empty": (b"", "cannot be read"),
    "no magic": (b"PK\x03\x04" + bytes(60), "it begins with"),
    "version 1": (header(0, 0, version=1), "version 1"),
    "big endian": (header(0, 0, version=3 << 24), "version"),
    "truncated counts": (b"GGUF\x03\x00\x00\x00\x01", "are declared"),
    "2^63 tensors": (header(1 << 63, 0), "tensors and"),
    "2^63 settings": (header(0, 1 << 63), "settings"),
    "endless text": (header(0, 1, struct.pack("<Q", 1 << 62)), "a text of"),
    "text past the end": (header(0, 1, struct.pack("<Q", 500) + b"abc"), "are declared"),
    "no UTF-8": (header(0, 1, text(b"\xff\xfe")), "not UTF-8"),
    "unknown type": (header(0, 1, text(b"a") + struct.pack("<I", 99)), "unknown type 99"),
    "nested array": (
        header(0, 1, text(b"a") + struct.pack("<IIQ", 9, 9, 1)),
        "an array of the type 9",
    ),
    "endless array": (header(0, 1, text(b"a") + struct.pack("<IIQ", 9, 0, 1 << 60)), "elements"),
    "array past the end": (
        header(0, 1, text(b"a") + struct.pack("<IIQ", 9, 10, 1 << 20)),
        "are declared",
    ),
    "a setting twice": (header(0, 2, LLAMA + LLAMA), "twice"),
    "no architecture": (header(0, 0), "architecture None"),
    "other architecture": (header(0, 1, LLAMA.replace(b"llama", b"mamba")), "architecture 'mamba'"),
    "unknown setting": (
        header(0, 2, LLAMA + text(b"llama.expert_group_count") + struct.pack("<II", 4, 8)),
        r"llama\.expert_group_count=8",
    ),
    "alignment": (
        header(0, 2, LLAMA + text(b"general.alignment") + struct.pack("<II", 4, 0)),
        "alignment is 0",
    ),
    "dimensions": (header(1, 1, LLAMA + entry(b"x", (1,) * 9, 0, 0)), "9 dimensions"),
    "no elements": (header(1, 1, LLAMA + entry(b"x", (0,), 0, 0)), "shape"),
    "parts of blocks": (header(1, 1, LLAMA + entry(b"x", (33, 1), 8, 0)), "shape"),
    "type": (header(1, 1, LLAMA + entry(b"x", (32,), 77, 0)), "number 77, which is not supported"),
    "known, not supported": (header(1, 1, LLAMA + entry(b"x", (256,), 15, 0)), "Q8_K"),
    "60,000 tensors": (header(60_000, 0), "60000 tensors and 0 settings; at most 16384"),
    "65,000 settings": (header(0, 65_000), "65000 settings"),
    "a cut array": (
        header(0, 1, text(b"a") + struct.pack("<IIQ", 9, 8, 3) + text(b"x") + text(b"y")),
        "3 texts from byte",
    ),
    "a long text in an array": (
        header(0, 1, text(b"a") + struct.pack("<IIQ", 9, 8, 1) + struct.pack("<Q", 5000)),
        "a text of 5000 bytes",
    ),
    "huge shape": (header(1, 1, LLAMA + entry(b"x", (1 << 62, 1 << 62), 0, 0)), "lie outside"),
    "past the end": (header(1, 1, LLAMA + entry(b"x", (32,), 0, 1 << 62)), "lie outside"),
    "not aligned": (header(1, 1, LLAMA + entry(b"x", (1,), 0, 1)) + bytes(99), "not aligned"),
    "overlap": (
        header(2, 1, LLAMA + entry(b"x", (32,), 0, 0) + entry(b"y", (32,), 0, 32)) + bytes(999),
        "overlap",
    ),
    "one name": (
        header(2, 1, LLAMA + entry(b"x", (8,), 0, 0) + entry(b"x", (8,), 0, 32)) + bytes(999),
        "two tensors of one name",
    ),
    "layers": (
        header(
            1,
            2,
            LLAMA
            + text(b"llama.block_count")
            + struct.pack("<II", 4, 1 << 31)
            + entry(b"token_embd.weight", (8, 8), 0, 0),
        )
        + bytes(999),
        "num_hidden_layers=2147483648|hidden_size=None",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_by_name(case, tmp_path):
    content, message = HOSTILE[case]
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(InvalidModel, match=message) as raised:
        load_model(path, device="cpu")
    assert "x.gguf" in str(raised.value)
    assert len(str(raised.value)) < 500


def test_of_a_small_tensor_all_bytes_are_sampled(tmp_path):
    begin = header(1, 1, LLAMA + entry(b"x", (8,), 0, 0))
    begin += bytes(-len(begin) % 32)
    found = []
    for last in (0, 1):
        path = tmp_path / f"{last}.gguf"
        path.write_bytes(begin + bytes(31) + bytes([last]))
        found.append(GGUFFile(path).sample(4096))
    assert found[0] != found[1]


def test_a_truncated_file_is_refused(zoo_file, tmp_path):
    content = zoo_file.read_bytes()
    path = tmp_path / "x.gguf"
    for num_bytes in (len(content) - 1, len(content) // 2, 5000, 100):
        path.write_bytes(content[:num_bytes])
        with pytest.raises(InvalidModel, match="no valid GGUF file"):
            load_model(path, device="cpu")


@pytest.mark.parametrize(("kind", "place"), [(Kind.Q8_0, 0), (Kind.Q4_1, 0), (Kind.Q4_1, 2)])
def test_scales_and_minima_that_are_no_numbers_are_refused(folder, tmp_path, kind, place):
    weights = load_file(folder / "model.safetensors")["lm_head.weight"].numpy()
    blocks = gguf.quantize(weights, kind)
    blocks[3, place : place + 2] = 255  # an fp16 NaN
    path = write_gguf(
        tmp_path / "nan.gguf", folder, all_of(kind), blocks={"lm_head.weight": blocks}
    )
    with pytest.raises(InvalidModel, match=r"scales in output\.weight that are NaN or infinite"):
        load_model(path, device="cpu", num_threads=1)


def test_missing_and_unknown_tensors_are_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_block_count(1)
    for add, value in (
        (writer.add_context_length, 64),
        (writer.add_embedding_length, 32),
        (writer.add_feed_forward_length, 32),
        (writer.add_head_count, 2),
        (writer.add_head_count_kv, 2),
        (writer.add_rope_dimension_count, 16),
    ):
        add(value)
    writer.add_layer_norm_rms_eps(1e-5)
    add_tokenizer(writer, zoo_path("zoo:code-40m"))
    writer.add_tensor("token_embd.weight", np.zeros((8192, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InvalidModel, match="do not fit its configuration: 10 missing"):
        load_model(tmp_path / "x.gguf", device="cpu")
