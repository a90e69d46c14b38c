"""Writes a model with matrices of 8 or 4 bits, and measures its loss in bits per byte."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from forerun.errors import InvalidModel, InvalidRequest
from forerun.models.architecture import QUANTISED, WeightFormat
from forerun.models.base import Context, LanguageModel, pack
from forerun.models.checkpoint import ModelFiles, read_object, weight_files
from forerun.models.decoder import unsupported
from forerun.models.families import find_family
from forerun.models.load import load_model
from forerun.models.quantised_folder import (
    EMBEDDING,
    GROUP,
    METHOD,
    QUANTISED_HEAD,
    quantise_matrix,
    stored_tensors,
)
from forerun.models.stored_tensors import write_files
from forerun.models.tokenizers import Tokenizer

MAX_TOKENS = 500
SETTINGS_FILES = (
    *("tokenizer", "generation_config", "chat_template", "special_tokens", "added_tokens"),
    *("vocab", "merges"),
)
"""Prefixes of the names of files that are copied."""
Report = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedModel:
    """A quantised folder that was written, and its loss on sample text."""

    folder: str
    weights: WeightFormat
    num_bytes: int
    num_bytes_before: int
    bits_per_byte: float
    quantised_bits_per_byte: float
    num_sample_bytes: int

    @property
    def loss(self) -> float:
        """Relative growth of the bits per byte."""
        return self.quantised_bits_per_byte / self.bits_per_byte - 1

    def to_dict(self) -> dict[str, object]:
        return asdict(self) | {"loss": self.loss}


def quantise_model(
    source: str, out: Path, weights: WeightFormat, texts: Sequence[str], report: Report
) -> QuantisedModel:
    """Write a model of the native runner with quantised matrices, and measure it on `texts`.

    `report` is called with what is being done and the share that is done.

    Raises:
        InvalidRequest: `out` is no empty folder, or the weights are no quantised ones.
        InvalidModel: the model cannot be read or is of an unsupported kind.
    """
    if weights not in QUANTISED:
        raise InvalidRequest(f"weights {weights!r} are not quantised; use {', '.join(QUANTISED)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidRequest(f"{out} exists already; give --out a folder that is new or empty")
    whole = ModelFiles.open(source)
    write_quantised(whole, out, weights, lambda share: report("quantising", 0.4 * share))
    found = []
    for place, (files, what) in enumerate(((whole, "bf16"), (ModelFiles.open(out), weights))):
        report(f"measuring {what}", 0.4 + 0.3 * place)
        dtype = "bf16" if what == "bf16" else "auto"
        model = load_model(
            files, dtype=dtype, device="cpu", max_batch=1, max_context=MAX_TOKENS + 1
        )
        found.append(bits_per_byte(model, files.tokenizer, texts))
    report("done", 1.0)
    return QuantisedModel(
        folder=str(out),
        weights=weights,
        num_bytes=sum(path.stat().st_size for path in weight_files(out)),
        num_bytes_before=sum(path.stat().st_size for path in whole.weight_files),
        bits_per_byte=found[0][0],
        quantised_bits_per_byte=found[1][0],
        num_sample_bytes=found[0][1],
    )


def write_quantised(
    source: str | Path | ModelFiles,
    out: Path,
    weights: WeightFormat,
    report: Callable[[float], None],
) -> None:
    """Write the folder; embeddings, norms and matrices without whole groups stay as stored."""
    files = ModelFiles.open(source)
    folder = files.folder
    if files.weights.is_packed:
        raise InvalidModel(f"{folder} is quantised already; give the model in bf16 or fp32")
    architecture = files.sizes
    if objection := unsupported(architecture, files.settings):
        raise InvalidModel(f"only models of the native runner are quantised, not {objection}")
    variant = find_family(architecture.name).variant
    assert variant is not None
    if variant.experts is not None:
        raise InvalidModel(
            f"the experts of {architecture.name} are not written in fewer bits; quantise them "
            f"while they are read (--weights {weights})"
        )
    body, head = QUANTISED[weights]
    stored = files.weights.names
    names = dict.fromkeys((*stored, QUANTISED_HEAD))
    parts = tuple(f"{part}.weight" for parts in variant.parts for part in parts)
    read = files.weights.reader(None, torch.device("cpu"))
    tensors = {}
    for place, name in enumerate(names):
        tensor = read(name if name in stored else EMBEDDING)
        bits = head if name == QUANTISED_HEAD else body if name.endswith(parts) else None
        if bits is None or tensor.shape[1] % GROUP:
            tensors[name] = tensor
        else:
            tensors |= stored_tensors(name, quantise_matrix(tensor, bits), bits)
        report((place + 1) / len(names))
    config = read_object(folder / "config.json") | {
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": METHOD},
    }
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name.startswith(SETTINGS_FILES):
            shutil.copyfile(path, out / path.name)
    write_files(out, config, "model.safetensors", tensors)


def bits_per_byte(
    model: LanguageModel, tokenizer: Tokenizer, texts: Sequence[str]
) -> tuple[float, int]:
    """Return the bits per byte of the beginnings of texts, and the bytes they have."""
    nats, num_bytes = 0.0, 0
    for text in texts:
        ids = tokenizer.encode(text)[: min(MAX_TOKENS, model.max_context)]
        if len(ids) < 2:
            continue
        tokens, context = torch.tensor(ids), Context(model.store, ids)
        batch = pack([context.span(len(ids))], tokens, range(len(ids)), model.device)
        rows = model.forward(batch).logits[:-1].log_softmax(-1)
        nats -= float(rows.gather(1, tokens[1:, None]).double().sum())
        num_bytes += len(tokenizer.decode(ids[1:]).encode())
        context.close()
    if not num_bytes:
        raise InvalidRequest("the sample has no text to measure on; give --sample a longer file")
    return nats / math.log(2) / num_bytes, num_bytes
