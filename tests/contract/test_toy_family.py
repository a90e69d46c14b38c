"""What a new family must touch: one row of `families.FAMILIES`, and its class in transformers.

The toy is Llama under another name with one variation, norms that multiply by 1 + weight. Its
module is written here, as a file of transformers would be; nothing else of forerun names it. A
real family is a row in `families.py` with a name of transformers, a line in `tests/contract` (in
`test_more_families.MORE` or `tiny.FAMILIES`), one in `test_gguf_families.CASES` if its GGUF files
are read, and a new run of `python recipes/docs/models.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from tests import tiny
from tests.contract.test_families import continued
from tests.gguf_files import all_of, write_gguf
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

from forerun.engine.engine import Engine
from forerun.models import families
from forerun.models.family import DecoderVariant, Family, GGUFForm
from forerun.sampling.config import SamplingParams

NUM_TOKENS = 12


class ToyConfig(LlamaConfig):
    model_type = "toy"


class ToyForCausalLM(LlamaForCausalLM):
    config_class = ToyConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        layers: Any = self.model.layers
        for layer in layers:
            layer.input_layernorm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)
            layer.post_attention_layernorm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.model.norm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)


ROW = Family(
    name="ToyForCausalLM",
    model_type="toy",
    variant=DecoderVariant(one_plus_norms=True),
    gguf=GGUFForm(architecture="toy", paired_rows=True),
)


@pytest.fixture(scope="module")
def network() -> Iterator[LlamaForCausalLM]:
    """A random toy; the row and the class are known while the tests of this module run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(families, "FAMILIES", {**families.FAMILIES, ROW.name: ROW})
        AutoConfig.register("toy", ToyConfig)
        AutoModelForCausalLM.register(ToyConfig, ToyForCausalLM)
        patch.setitem(tiny.FAMILIES, "toy", ("ToyForCausalLM", {"num_key_value_heads": 1}))
        patch.setattr(tiny.transformers, "ToyForCausalLM", ToyForCausalLM, raising=False)
        made = tiny.network("toy", seed=5)
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if "norm" in name:
                    parameter.sub_(1.0)
        yield made


@pytest.fixture(scope="module")
def folder(network: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("toy")
    network.save_pretrained(place)
    tiny.backend().save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def gguf_file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a GGUF file, whose norms are stored with 1 added."""
    place = tmp_path_factory.mktemp("toy-gguf")
    for path in folder.iterdir():
        place.joinpath(path.name).write_bytes(path.read_bytes())
    stored = load_file(folder / "model.safetensors")
    added = {name: tensor + 1.0 if "norm" in name else tensor for name, tensor in stored.items()}
    save_file(added, place / "model.safetensors", metadata={"format": "pt"})
    return write_gguf(place / "toy.gguf", place, all_of(Kind.F32), architecture="toy")


@pytest.mark.parametrize("runner", ["native", "eager"])
@pytest.mark.parametrize("draft", [None, "suffix", "self:1"])
def test_a_folder_says_what_transformers_says(network, folder, runner, draft):
    check_text(network, folder, draft, runner)


def test_a_gguf_file_says_what_transformers_says(network, gguf_file):
    check_text(network, gguf_file, None, "native")


def check_text(network: LlamaForCausalLM, source: Path, draft: str | None, runner: str) -> None:
    prompts = [tiny.tokenizer().encode(prompt) for prompt in tiny.PROMPTS]
    expected = [continued(network, ids, NUM_TOKENS) for ids in prompts]
    assert len({tuple(ids) for ids in expected}) > 1
    engine = Engine.load(
        source,
        draft=draft,
        dtype="float32",
        device="cpu",
        config=tiny.settings(runner=runner, num_threads=1 if runner == "native" else None),
    )
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = engine.generate(prompts, params)
    assert [list(output.token_ids) for output in outputs] == expected
