"""A transformers model as a LanguageModel: packed rows in, logits of requested rows out."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import MethodType
from typing import Any, TypeVar

import torch
import transformers
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

from forerun.errors import InvalidModel, InvalidRequest
from forerun.models.architecture import LAYER_COUNTS, Architecture, read_architecture
from forerun.models.attention import ATTENTION_NAME, attend_as_falcon, plan_pass, register, running
from forerun.models.base import Context, ModelOutput, RowBatch, StoredModel, pack
from forerun.models.checkpoint import ModelFiles
from forerun.models.families import find_family
from forerun.models.kv_store import ContiguousKVStore
from forerun.models.memory import geometry_of
from forerun.models.recurrent import RecurrentPass, RecurrentStore, pack_recurrent_layers
from forerun.models.stored_tensors import TEXT_NAMES, keep_text

ModuleT = TypeVar("ModuleT", bound=nn.Module)

logger = logging.getLogger("forerun.loading")


LAYERS = ("layers", "h")
NORMS = ("norm", "final_layernorm", "embedding_norm", "ln_f", "norm_f", "final_layer_norm")
"""Names that model classes of transformers give their last norm."""


def find_part(network: Any, *names: str) -> Any:
    """Return the module of a network's decoder that has one of these names; None without one."""
    body = network.base_model
    for name in ("model", "decoder"):  # in Llama 4, in OPT
        body = dict(body.named_children()).get(name, body)
    return next((module for name, module in body.named_children() if name in names), None)


class HuggingFaceModel(StoredModel):
    """A LanguageModel over a transformers model that attends through `attend_packed`."""

    store: ContiguousKVStore

    def __init__(
        self, *, network: Any, store: ContiguousKVStore, architecture: Architecture
    ) -> None:
        super().__init__(architecture, store)
        self.family = find_family(architecture.name)
        self.replace_network(network)

    def replace_network(self, network: Any) -> None:
        """Run this network, of the same architecture, from now on; the KV store is kept."""
        self.network = network
        self.num_parameters = sum(parameter.numel() for parameter in network.parameters())
        self._recurrent_pass: RecurrentPass | None = None
        if isinstance(self.store, RecurrentStore) and self.architecture.recurrent is not None:
            self._recurrent_pass = pack_recurrent_layers(network, self.architecture, self.store)

    @torch.inference_mode()
    def forward(self, batch: RowBatch) -> ModelOutput:
        self._check_features(batch.feature_layers)
        sizes = self.architecture
        positions = batch.positions
        if sizes.position_limit is not None:
            # Rows staged past the last position can never be committed: any position does.
            positions = positions.clamp(max=sizes.max_positions - 1)
        groups = sizes.num_heads // sizes.num_kv_heads
        attention = plan_pass(batch.spans, self.store, groups, sizes.attention_layers)
        if self._recurrent_pass is not None:
            self._recurrent_pass.begin(batch.spans)
        with (
            running(attention),
            captured(find_part(self.network, *LAYERS), batch.feature_layers) as features,
        ):
            outputs = self.network(
                input_ids=batch.tokens[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=batch.logit_rows,
            )
        if not features:
            return ModelOutput(logits=outputs.logits[0])
        stacked = torch.stack([features[layer][0] for layer in batch.feature_layers], dim=1)
        return ModelOutput(logits=outputs.logits[0], features=stacked)

    @torch.inference_mode()
    def embed(self, tokens: Int64[Tensor, " rows"]) -> Float[Tensor, "rows width"]:
        """Token embeddings as they enter the residual stream, without learned positions."""
        embedded = self.network.get_input_embeddings()(tokens)
        embedded = embedded * self._get_setting("embedding_multiplier", 1.0)
        if self._get_setting("mup_enabled", False):
            embedded = embedded * self.architecture.hidden_size**0.5
        if self.family.norms_embedding:
            embedded = self.final_norm(embedded)
        return self._apply_part(embedded, "project_in")

    @torch.inference_mode()
    def final_norm(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        """Apply the final norm; models without one return the rows unchanged."""
        return self._apply_part(hidden, *NORMS)

    @torch.inference_mode()
    def head(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows vocab"]:
        """Logits of rows after the final norm, with the logit scale and cap of the model family."""
        projected = self._apply_part(hidden, "project_out")
        logits: Tensor = self.network.get_output_embeddings()(projected)
        scaling = self._get_setting("logits_scaling", 1.0)
        divisor = 1 / scaling if self.family.multiplies_logits else scaling
        logits = logits * self._get_setting("logit_scale", 1.0) / divisor
        cap = self._get_setting("final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _get_setting(self, name: str, default: Any) -> Any:
        return self.network.config.to_dict().get(name, default)

    def _apply_part(self, rows: Tensor, *names: str) -> Tensor:
        """Apply a part of the network to rows; without such a part they are unchanged."""
        part = find_part(self.network, *names)
        projected: Tensor = rows if part is None else part(rows)
        return projected

    def first_layers(self, num_layers: int) -> HuggingFaceModel:
        shorter = sharing(self.network)
        del find_part(shorter, *LAYERS)[num_layers:]
        return HuggingFaceModel(
            network=shorter,
            store=self.store,
            architecture=replace(self.architecture, num_layers=num_layers),
        )


@contextmanager
def captured(layers: nn.ModuleList, wanted: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
    """Record the inputs of selected layers of a network during a pass.

    `len(layers)` in `wanted` stands for what leaves the last one. Yields them by layer, batch
    dimension first; filled when the pass is over.
    """
    found: dict[int, Tensor] = {}

    def entering(layer: int) -> Callable[[nn.Module, Any, Any], None]:
        def note(_: nn.Module, args: Any, kwargs: Any) -> None:
            found[layer] = args[0] if args else kwargs["hidden_states"]

        return note

    def leaving(_: nn.Module, __: Any, output: Any) -> None:
        found[len(layers)] = output[0] if isinstance(output, tuple) else output

    handles = [
        layers[layer].register_forward_pre_hook(entering(layer), with_kwargs=True)
        if layer < len(layers)
        else layers[-1].register_forward_hook(leaving)
        for layer in set(wanted)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def adapt(
    model: PreTrainedModel,
    *,
    num_slots: int,
    max_context: int,
    max_staged_rows: int = 64,
) -> HuggingFaceModel:
    """Wrap a transformers model as a LanguageModel; its attention is replaced in place."""
    architecture = read_architecture(type(model).__name__, model.config.to_dict())
    if architecture.position_limit is not None and max_context > architecture.max_positions:
        raise InvalidRequest(
            f"max_context is {max_context}; {architecture.name} has {architecture.max_positions} "
            f"positions and no more: {architecture.position_limit}"
        )
    geometry = geometry_of(
        architecture,
        num_slots=num_slots,
        capacity=max_context,
        max_staged_rows=max_staged_rows,
        dtype=model.dtype,
    )
    prepare_network(model)
    store_class = ContiguousKVStore if architecture.recurrent is None else RecurrentStore
    return HuggingFaceModel(
        network=model, store=store_class(geometry, model.device), architecture=architecture
    )


def prepare_network(model: PreTrainedModel) -> None:
    """Let the modules of a transformers model attend through `attend_packed`, in place."""
    register()
    model.set_attn_implementation(ATTENTION_NAME)
    untyped: Any = model  # the method below carries no annotations
    untyped.eval()
    for module in model.modules():
        own: Any = module
        if type(module).__name__ == "FalconAttention":
            own.forward = MethodType(attend_as_falcon, module)
        elif type(module).__name__ == "Llama4TextAttention":
            own.attn_temperature_tuning = False  # 1 up to the last position; counts rows instead


NUM_COMPARED = 24
"""Tokens over which a small network is compared with transformers, in two passes."""
MAX_DIFFERENCE = 1e-3
"""Largest difference of fp32 logits relative to the largest logit; rounding alone gives 1e-5."""
MAX_SMALL = (
    ("vocab_size(_per_layer_input)?", 256),
    (".*(intermediate_size|ffn).*", 64),
    ("(moe_)?num_(local_)?experts|n_routed_experts", 16),
    ("sliding_window", 8),
    ("num_experts_per_tok|top_k_experts|moe_(top)?k|attn_layer_period|num_kv_shared_layers", 2),
    ("first_k_dense_replace|num_dense_layers|attn_layer_offset", 1),
    (".*_token_id", 0),
)
"""Patterns of names of settings, with the largest value of each in a small network."""
HEADS = re.compile("(heads|n_head|n_groups|heads_per_layer)$")
WIDTHS = ("hidden_size", "n_embd", "mamba_d_ssm", "word_embed_proj_dim")


def check_passes(model_class: Any, config: Any) -> None:
    """Refuse a model class whose packed passes give other logits than transformers' own pass.

    A release of transformers may rename parameters of modules, which then ignore states, masks or
    windows without an error. So a small random network of this class, with these settings, runs
    both ways in fp32. It is small because passes over the real weights take long and because its
    windows must be shorter than the text, and fp32 because the rounding of bf16 would hide faults.
    If no such network can be built or run, the comparison is left out with a warning.

    Raises:
        InvalidModel: the logits differ with two sets of weights, or a module takes or keeps its
            states in a way that this version of forerun does not support.
    """
    name = f"{model_class.__name__} of transformers {transformers.__version__}"
    difference = 0.0
    for seed in range(2):  # with one, two experts may be equally good
        own = None
        try:
            with quiet_transformers():
                network = _build_network(model_class, _trim_settings(config), seed)
                ids, own = _compute_logits(network, seed)
            difference = _measure_difference(network, ids, own)
        except Exception as error:
            if own is not None and isinstance(error, InvalidModel):
                raise
            logger.warning("%s was not compared with its own pass: %.200s", name, error)
            return
        if difference <= MAX_DIFFERENCE:
            return
    raise InvalidModel(
        f"{name} would give wrong text with this version of forerun (in a small network its logits "
        f"differ by {difference:.1%} from its own pass): install another version of transformers"
    )


def _trim_settings(config: Any) -> Any:
    """Return settings of the same class with few and narrow layers, one of each kind at least."""
    given = config.to_dict()
    lists = {k: v for k, v in given.items() if "layer" in k and isinstance(v, list)}
    num_layers = next(
        filter(None, map(given.get, LAYER_COUNTS)), len(lists.get("layers_block_type", ()))
    )
    by_layer = [k for k, v in lists.items() if len(v) == num_layers and k != "moe_layers"]
    kinds = [*zip(*(given[name] for name in by_layer), strict=True)] or [()] * num_layers
    places = sorted(kinds.index(kind) for kind in set(kinds))
    places = (places * 4)[: max(4, len(places))]
    given |= {name: [given[name][place] for place in places] for name in by_layer}
    if layers := given.get("per_layer_config"):
        there = {int(layer): settings for layer, settings in layers.items()}
        chosen = {new: there[old] for new, old in enumerate(places) if old in there}
        given["per_layer_config"] = chosen
    if given.get("attn_layer_indices"):
        given["attn_layer_indices"] = [1]
    heads = {
        k: v if isinstance(v, list) else [v] for k, v in given.items() if HEADS.search(k) and v
    }
    heads = {k: v for k, v in heads.items() if min(v) > 1}
    width = next(given[name] for name in WIDTHS if name in given)
    divisor = math.gcd(width, *itertools.chain(*heads.values())) if heads else max(1, width // 64)
    for name, value in given.items():
        if name in heads and isinstance(value, list):
            given[name] = [number // divisor for number in value]
        elif type(value) is int:
            most = [most for pattern, most in MAX_SMALL if re.fullmatch(pattern, name)]
            number = value // divisor if name in heads or name in WIDTHS else value
            given[name] = len(places) if name in LAYER_COUNTS else min([number, *most])
    return type(config).from_dict(given)


def _build_network(model_class: Any, config: Any, seed: int) -> Any:
    """Return a network whose layers add about as much to the residual stream as they get."""
    with no_init_weights():
        network = model_class._from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in network.eval().requires_grad_(False).named_parameters():
        size = 2.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5
        parameter.uniform_(-size, size, generator=generator)
        if parameter.dim() == 1 and "norm" in name and name.endswith("weight"):
            parameter.add_(1.0)
    network.tie_weights()
    return network


@torch.inference_mode()
def _compute_logits(network: Any, seed: int) -> tuple[Tensor, Tensor]:
    """Return tokens, and their logits as transformers computes them."""
    limit = read_architecture(type(network).__name__, network.config.to_dict()).max_positions
    ids = torch.empty(min(NUM_COMPARED, limit), dtype=torch.int64)
    ids.random_(network.config.vocab_size, generator=torch.Generator().manual_seed(seed))
    return ids, network(ids[None], use_cache=False).logits[0]


@torch.inference_mode()
def _measure_difference(network: Any, ids: Tensor, own: Tensor) -> float:
    """Return the largest difference of packed passes from `own`, relative to the largest logit."""
    model = adapt(network, num_slots=1, max_context=len(ids))
    context = Context(model.store, ids.tolist())
    packed = []
    for part in ids.chunk(2):
        rows = [*range(len(part))]
        batch = pack([context.span(len(rows))], part, rows, model.device)
        packed.append(model.forward(batch).logits)
        context.commit(rows)
    difference = (torch.cat(packed) - own).abs().max() / own.abs().max()
    return math.inf if difference.isnan() else float(difference)


def sharing(model: ModuleT) -> ModuleT:
    """Copy the modules and the configuration of a model, sharing its parameters."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def read_class(files: ModelFiles) -> tuple[Any, Any]:
    """Return the class of a checkpoint in transformers and its configuration; reads no weights.

    Raises InvalidModel where transformers refuses the configuration.
    """
    try:
        with quiet_transformers():
            config = files.read_transformers_config()
    except Exception as error:
        raise InvalidModel(f"{files.folder} cannot be loaded: {error}") from error
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config
    return getattr(transformers, files.architecture), config  # Mistral 4 is not among them


def read_weights(files: ModelFiles, dtype: torch.dtype) -> Any:
    """The transformers model, with every parameter from the files.

    transformers fills what is missing or misshapen with random numbers and reports it; here that
    is an error.

    Raises:
        InvalidModel: parameters are missing, unknown or have the wrong shape.
    """
    model_class, config = read_class(files)
    if files.weights.rope_factors is not None:
        raise InvalidModel(
            f"{files.folder} scales its rotations pair by pair, which transformers' modules "
            "cannot be given; use the model in its original form, a folder with *.safetensors"
        )
    try:
        with quiet_transformers():
            with torch.device("meta"):
                described = model_class._from_config(copy.deepcopy(config), dtype=dtype)
            _check_count(files, sum(each.numel() for each in described.parameters()))
            tensors = files.state_dict()
            model, info = model_class.from_pretrained(
                files.folder if tensors is None else None,
                config=config,
                state_dict=tensors,
                key_mapping=dict(TEXT_NAMES) if files.has_vision else None,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except InvalidModel:
        raise
    except Exception as error:
        raise InvalidModel(f"{files.folder} cannot be loaded: {error}") from error
    for problem in ("missing", "unexpected", "mismatched"):
        names = sorted(keep_text(str(name) for name in info[f"{problem}_keys"]))
        if names:
            raise InvalidModel(
                f"the weights in {files.folder} do not fit its configuration: "
                f"{len(names)} {problem}, the first {names[0]}"
            )
    return model


def _check_count(files: ModelFiles, num_described: int) -> None:
    """Refuse a configuration of far more parameters than stored before memory is taken for them.

    Weights that lack less are read, so that the error can name what is missing.
    """
    if num_described > 2 * files.num_parameters:
        raise InvalidModel(
            f"the weights in {files.folder} do not fit its configuration: it describes "
            f"{num_described} parameters, and {files.num_parameters} are stored"
        )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and reports, whose content is raised as errors here."""
    untyped: Any = transformers_logging
    verbosity, had_bars = untyped.get_verbosity(), untyped.is_progress_bar_enabled()
    untyped.set_verbosity(untyped.CRITICAL)
    untyped.disable_progress_bar()
    try:
        yield
    finally:
        untyped.set_verbosity(verbosity)
        if had_bars:
            untyped.enable_progress_bar()
