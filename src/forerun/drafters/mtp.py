"""Drafting with the multi-token-prediction (MTP) module that ships inside a model's checkpoint.

Row t joins the target's hidden state at position t, after the final norm, with the embedding of
token t + 1: h' = layer(proj [norm(embedding); norm(hidden)]). The final norm of the module and the
target's head then predict token t + 2 (DeepSeek-V3, 2412.19437, section 2.2). To draft further, the
normed output takes the place of the target's state. The layer is one of the target's own family, so
it runs as a transformers model of one layer, behind a target on any runner.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
import transformers
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from forerun.drafters.eagle3.drafter import Eagle3Drafter, TorchHead
from forerun.errors import IncompatibleDraft, InvalidModel
from forerun.models.architecture import Architecture, read_architecture
from forerun.models.attention import ATTENTION_NAME, plan_pass, register, running
from forerun.models.base import LanguageModel, ModelOutput, RowBatch
from forerun.models.checkpoint import ModelFiles
from forerun.models.mtp_layout import FoundModule, Layout, open_module
from forerun.models.stored_tensors import check_tensors

logger = logging.getLogger("forerun.loading")

ADVICE = "fetch the checkpoint again, or choose another draft"


class MTPModule(nn.Module):
    """The projection of a module, and its layer and final norm as a decoder of one layer."""

    def __init__(self, decoder: Any, *, hidden_first: bool) -> None:
        super().__init__()
        width, norm = decoder.config.hidden_size, type(decoder.norm)
        self.hidden_first = hidden_first
        self.embedding_norm = norm(width, eps=decoder.config.rms_norm_eps)
        self.hidden_norm = norm(width, eps=decoder.config.rms_norm_eps)
        self.projection = nn.Linear(2 * width, width, bias=False)
        self.decoder = decoder

    def forward(
        self,
        embedded: Float[Tensor, "rows width"],
        hidden: Float[Tensor, "rows width"],
        positions: Int64[Tensor, " rows"],
    ) -> Float[Tensor, "rows width"]:
        """Return normed rows, which the target's head reads."""
        parts = [self.embedding_norm(embedded), self.hidden_norm(hidden)]
        joined = self.projection(torch.cat(parts[:: -1 if self.hidden_first else 1], dim=-1))
        output: Any = self.decoder(
            inputs_embeds=joined[None], position_ids=positions[None], use_cache=False
        )
        normed: Tensor = output.last_hidden_state[0]
        return normed


class MTPModel(TorchHead):
    """A LanguageModel over an MTP module, with the target's embedding and head."""

    def __init__(
        self, module: MTPModule, architecture: Architecture, target: LanguageModel
    ) -> None:
        super().__init__(module, architecture, target)
        self.network = module

    def fuse(
        self, features: Float[Tensor, "rows layers target_width"]
    ) -> Float[Tensor, "rows width"]:
        """Return the input states of rows: the target's last layer after its final norm."""
        return self.target.final_norm(features[:, 0]).to(self.device, self.dtype)

    @torch.inference_mode()
    def forward(self, batch: RowBatch) -> ModelOutput:
        states = self._states.of(batch)
        with running(plan_pass(batch.spans, self.store, self._groups)):
            # Row t holds token t + 1, and is at its position.
            output = self.network(self.embed(batch.tokens), states, batch.positions + 1)
        wanted = output.index_select(0, batch.logit_rows)
        self._states.note(batch, states, wanted)
        return ModelOutput(logits=self.head(wanted))

    def embed(self, tokens: Int64[Tensor, " rows"]) -> Float[Tensor, "rows width"]:
        return self.target.embed(tokens).to(self.dtype)

    def final_norm(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        normed: Tensor = self.network.decoder.norm(hidden)
        return normed

    def head(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows vocab"]:
        return self.target.head(hidden)


class MTPDrafter(Eagle3Drafter):
    """Drafts chains and trees with the MTP module of the target's checkpoint."""

    method = "mtp"


def check_mtp(argument: str, num_target_layers: int) -> None:
    """Refuse a model that is missing or ships no such module."""
    open_module(argument)


def load_mtp(argument: str, target: LanguageModel) -> MTPDrafter:
    """Load the first MTP module in a target's own folder.

    Raises:
        InvalidModel: the folder has no module, or its tensors do not fit the configuration.
        IncompatibleDraft: the module belongs to a target of other sizes.
    """
    files, found = open_module(argument)
    if found.num_modules > 1:
        logger.warning(
            "%s brings %d MTP modules: the first one drafts, applied to its own output",
            files.folder,
            found.num_modules,
        )
    dtype = target.dtype
    module, architecture = _empty_module(files, found.layout, dtype)
    if architecture.hidden_size != target.hidden_size:
        raise IncompatibleDraft(
            f"the MTP module in {files.folder} has the width {architecture.hidden_size}, this "
            f"target has {target.hidden_size}: a module drafts for its own target alone"
        )
    tensors = _tensors(files, found, dtype)
    expected = module.state_dict()
    check_tensors(expected, tensors, f"{files.folder} ({found.prefix}*)", advice=ADVICE)
    module.load_state_dict(tensors)
    module.to(target.device).eval().requires_grad_(False)
    model = MTPModel(module, architecture, target)
    return MTPDrafter(model, (target.num_layers,), target.vocab_size)


ONE_LAYER: Mapping[str, Any] = MappingProxyType(
    {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "first_k_dense_replace": 0,
        "mlp_only_layers": [],
        "mlp_layer_types": ["sparse"],
        "decoder_sparse_step": 1,
        "vocab_size": 1,
        "pad_token_id": None,
    }
)
"""Settings of a target's configuration that make it that of its module: one layer that attends to
everything, with experts where the family has them, without embedding and head."""


def _empty_module(
    files: ModelFiles, layout: Layout, dtype: torch.dtype
) -> tuple[MTPModule, Architecture]:
    """Build a module by the configuration of its target, with weights that are not set yet."""
    try:
        whole = transformers.AutoConfig.from_pretrained(
            files.folder, local_files_only=True, trust_remote_code=False
        )
        config: Any = copy.deepcopy(whole.get_text_config())
        for name, value in ONE_LAYER.items():
            if hasattr(config, name):
                setattr(config, name, value)
        text_class: Any = transformers.AutoModelForCausalLM
        register()
        with no_init_weights():
            network = text_class.from_config(
                config, dtype=dtype, attn_implementation=ATTENTION_NAME
            )
            decoder = network.get_decoder()
            decoder.embed_tokens = None
            module = MTPModule(decoder, hidden_first=layout.hidden_first).to(dtype)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidModel(
            f"the configuration in {files.folder} describes no layer of an MTP module: {error}"
        ) from error
    architecture = read_architecture(type(network).__name__, config.to_dict())
    return module, replace(architecture, recurrent=None, attention_layers=None)


def _tensors(files: ModelFiles, found: FoundModule, dtype: torch.dtype) -> dict[str, Tensor]:
    """Read the tensors of a module by the names that `MTPModule` has for them."""
    read = files.weights.reader(dtype, torch.device("cpu"))
    layout = found.layout
    tensors: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name in files.weights.names:
        rest = name.removeprefix(found.prefix)
        is_later = bool(layout.layer) and re.match(r"layers\.[1-9]", rest) is not None
        if rest == name or rest in layout.ignored or is_later:
            continue
        own = layout.own.get(rest) or "decoder.layers.0." + rest.removeprefix(layout.layer)
        if each := re.fullmatch(r"(.*\.experts\.)(\d{1,9})\.(\w+)\.weight", own):
            experts.setdefault(each[1] + each[3], {})[int(each[2])] = read(name)
        else:
            tensors[own] = read(name)
    return tensors | _stacked(experts)


def _stacked(experts: Mapping[str, Mapping[int, Tensor]]) -> dict[str, Tensor]:
    """Stack the matrices of experts as transformers has them, gate and up in one tensor."""
    whole: dict[str, Tensor] = {}
    for name, each in experts.items():
        if len({tensor.shape for tensor in each.values()}) > 1 or max(each) >= len(each):
            raise InvalidModel(f"the experts of {name} are not numbered from 0, or differ in shape")
        whole[name] = torch.stack([each[index] for index in range(len(each))])
    for gate in [name for name in whole if name.endswith(".gate_proj")]:
        up = whole.pop(gate.removesuffix("gate_proj") + "up_proj", None)
        half = whole.pop(gate)
        joined = half if up is None else torch.cat([half, up], dim=1)
        whole[gate.removesuffix("gate_proj") + "gate_up_proj"] = joined
    return whole
