"""A GGUF file as a model: what its metadata say in place of the files of a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from forerun.cache import HASH_LENGTH, cache_folder, cached_json, hash_of
from forerun.models.checkpoint import FLOATS, SAMPLE_BYTES, Description, ModelFiles
from forerun.models.gguf.file import GGUFFile, open_gguf
from forerun.models.gguf.tokenizer import ENDS, build_tokenizer, special_tokens, split_rule
from forerun.models.tokenizers import (
    Tokenizer,
    TokenizerDefinition,
    library_versions,
    render_template,
)


class GGUFModel(ModelFiles):
    """A model in one GGUF file."""

    config: Mapping[str, Any] = MappingProxyType({})
    generation_names = MappingProxyType(
        {
            "temperature": "general.sampling.temp",
            "top_p": "general.sampling.top_p",
            "top_k": "general.sampling.top_k",
            "min_p": "general.sampling.min_p",
            "repetition_penalty": "general.sampling.penalty_repeat",
        }
    )

    @cached_property
    def weights(self) -> GGUFFile:
        """The checked file."""
        return open_gguf(self.folder)

    @property
    def weight_files(self) -> tuple[Path, ...]:
        return (self.folder,)

    def check(self) -> None:
        """Refuse a file without tensors, or with a tokenizer whose rule is unknown."""
        if self.weights.metadata.get("tokenizer.ggml.model") == "gpt2":
            split_rule(self.weights)
        self.check_tensors()

    @cached_property
    def description(self) -> Description:
        return Description(self.weights.architecture, False, "BF16", {})

    @property
    def stored_dtype(self) -> str:
        """Most common element type; bf16 for files with blocks of fewer bits."""
        counts = self.weights.type_counts
        return counts.most_common(1)[0][0] if counts.keys() <= FLOATS else "BF16"

    @property
    def settings_key(self) -> bytes:
        return json.dumps(self.weights.settings, sort_keys=True).encode()

    def transformers_config(self) -> Any:
        """Return transformers' configuration object; raises whatever transformers raises."""
        return self.weights.config()

    def state_dict(self) -> dict[str, Tensor]:
        """Return all parameters, dequantised."""
        return {name: self.weights.read(name) for name in self.weights.tensors}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer and the chat template in the metadata (InvalidModel)."""
        file = self.weights
        template = file.metadata.get("tokenizer.chat_template")
        key = hash_of(library_versions() + file.header_hash.encode())
        kept = cached_json(
            cache_folder(),
            f"tokenizer-of-gguf-{version('forerun')}-{key}",
            lambda: {"content": build_tokenizer(file).to_str(), "special": special_tokens(file)},
        )
        definition = TokenizerDefinition(
            content=kept["content"],
            eos_token_id=file.token_id("eos"),
            splits_special_tokens=False,
            chat_template=template if isinstance(template, str) and template else None,
        )
        return Tokenizer(
            definition,
            lambda other: render_template(other or str(definition.chat_template), kept["special"]),
        )

    @property
    def generation_path(self) -> Path:
        return self.folder

    @cached_property
    def generation_config(self) -> Mapping[str, Any]:
        """The sampling parameters in the metadata, by their names here."""
        metadata = self.weights.metadata
        return {name: metadata.get(key) for name, key in self.generation_names.items()}

    def eos_token_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Collect the end-of-text ids that the metadata name, and the tokens known to end texts."""
        added = tokenizer.added.items()
        known = {token for token, (text, is_special) in added if is_special and text in ENDS}
        stated = tokenizer.eos_token_id
        known |= set() if stated is None else {stated}
        return self.weights.eos_token_ids | known

    @cached_property
    def sample_hash(self) -> str:
        return hash_of(self.weights.sample(SAMPLE_BYTES))[:HASH_LENGTH]

    @property
    def tokenizer_hash(self) -> str:
        return self.weights.header_hash

    @property
    def template_hash(self) -> str:
        """Hash of nothing: the template is a part of the header, which `tokenizer_hash` covers."""
        return hash_of(b"")
