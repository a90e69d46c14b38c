"""Tiny targets that bring a multi-token-prediction module, and the module by its published formula.

The formula (DeepSeek-V3, 2412.19437, section 2.2) is computed with transformers' own layer class,
row by row, without a cache.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests import tiny
from tests.contract.test_more_families import network
from torch import Tensor

# Per family the class that a folder of it names, and its tensors beside the layer: norm of the
# embedding, norm of the hidden state, projection, final norm; then what the layer is called.
NEXT = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0")
DEEP = "model.layers.4"
NUMBERED = (f"{DEEP}.enorm", f"{DEEP}.hnorm", f"{DEEP}.eh_proj", f"{DEEP}.shared_head.norm", DEEP)
MIMO = "model.mtp_layers.0"
FAMILIES = {
    "Qwen2": (
        *(f"{MIMO}.token_layernorm", f"{MIMO}.hidden_layernorm", f"{MIMO}.input_proj"),
        *(f"{MIMO}.final_layernorm", MIMO),
    ),
    "Glm4Moe": NUMBERED,
    "Glm4MoeLite": NUMBERED,
    "DeepseekV3": NUMBERED,
    "Qwen3Next": NEXT,
    "Qwen3_5": NEXT,
    "Qwen3_5Moe": NEXT,
}
CHANGES = {
    "first_k_dense_replace": 0,
    "mlp_only_layers": [],
    "mlp_layer_types": ["sparse"],
    "decoder_sparse_step": 1,
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
}


class Reference:
    """A module by the formula, over a network of transformers."""

    def __init__(self, family: str, *, seed: int = 5, scale: float = 0.3) -> None:
        self.family = family
        self.network: Any = network(family)
        config = copy.deepcopy(self.network.config)
        for name, value in CHANGES.items():
            if hasattr(config, name):
                setattr(config, name, value)
        config._attn_implementation = "eager"
        self.base: Any = self.network.model
        layer, norm, width = type(self.base.layers[-1]), type(self.base.norm), config.hidden_size
        self.modules = torch.nn.ModuleList(
            [
                *(norm(width, eps=config.rms_norm_eps) for _ in range(2)),
                torch.nn.Linear(2 * width, width, bias=False),
                norm(width, eps=config.rms_norm_eps),
                layer(config, 0),
            ]
        )
        self.modules.eval().requires_grad_(False)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.modules.state_dict().items():
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.normal_(float(is_norm), scale, generator=generator)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors as the family's checkpoints name them, experts one by one."""
        named: dict[str, Tensor] = {}
        for module, prefix in zip(self.modules, FAMILIES[self.family], strict=True):
            for name, tensor in module.state_dict().items():
                named[f"{prefix}.{name}"] = tensor
        if FAMILIES[self.family] is NUMBERED:
            named[f"{DEEP}.embed_tokens.weight"] = self.base.embed_tokens.weight
            named[f"{DEEP}.shared_head.head.weight"] = self.network.lm_head.weight
        for name in [name for name in named if ".experts." in name]:
            stacked, start = named.pop(name), name.rpartition(".")[0]
            kinds = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
            for index, expert in enumerate(stacked):
                for kind, part in zip(kinds, expert.chunk(len(kinds)), strict=True):
                    named[f"{start}.{index}.{kind}.weight"] = part
        return {name: tensor.clone() for name, tensor in named.items()}

    def save(self, folder: Path, changed: dict[str, Tensor | None] | None = None) -> Path:
        """Write target, module and tokenizer; `changed` replaces tensors, or leaves out None."""
        self.network.save_pretrained(folder)
        tiny.backend().save_pretrained(folder)
        path = folder / "model.safetensors"
        tensors = load_file(path) | self.tensors() | (changed or {})
        save_file({k: v.contiguous() for k, v in tensors.items() if v is not None}, path)
        return folder

    @torch.inference_mode()
    def probs(self, ids: list[int], drafted: list[int]) -> Tensor:
        """Distribution behind committed and drafted tokens, all rows computed for each again."""
        hidden = [*self.base(torch.tensor([ids[:-1]])).last_hidden_state[0]]
        tokens = torch.tensor([*ids[1:], *drafted])
        for _ in range(len(drafted) + 1):
            output = self._rows(tokens[: len(hidden)], torch.stack(hidden))
            hidden.append(output[-1])
        logits: Tensor = self.network.lm_head(hidden[-1])
        return logits.float().softmax(-1)

    def _rows(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        embedding_norm, hidden_norm, projection, last_norm, layer = self.modules
        embedded = embedding_norm(self.base.embed_tokens(tokens))
        parts = [embedded, hidden_norm(hidden)]
        if self.family == "Qwen2":  # MiMo puts the hidden state first
            parts.reverse()
        joined = projection(torch.cat(parts, -1))[None]
        num_rows = len(tokens)
        positions = torch.arange(1, num_rows + 1)[None]
        mask = torch.full((num_rows, num_rows), -torch.inf).triu(1)[None, None]
        output = layer(
            joined,
            position_embeddings=self.base.rotary_emb(joined, positions),
            attention_mask=mask,
            position_ids=positions,
        )
        normed: Tensor = last_norm(output[0] if isinstance(output, tuple) else output)
        return normed[0]
