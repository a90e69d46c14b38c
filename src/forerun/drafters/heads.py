"""Common parts of heads on a target: sizes, config.json, torch modules and files of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from forerun.errors import IncompatibleDraft, InvalidModel
from forerun.models.architecture import ROPE_KEYS, Architecture, checked_size, optional_size
from forerun.models.checkpoint import WEIGHTS, weight_files
from forerun.models.decoder import rotation
from forerun.models.stored_tensors import check_tensors, read_tensors, write_files


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Sizes of a head of decoder layers on a target.

    Attributes:
        feature_layers: layers of the target whose input is concatenated, in this order; layer 0
            stands for the embeddings, the number of layers for what leaves the last one.
        hidden_size: width of the head; with the target's embedding it is that of the target.
        rope: rotary positions as transformers writes them (`rope_parameters`).
    """

    target_hidden_size: int
    target_vocab_size: int
    feature_layers: tuple[int, ...]
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int = 1
    norm_eps: float = 1e-6
    rope: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    max_positions: int = 2048
    own_embedding: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.draft_vocab_size <= self.target_vocab_size:
            raise InvalidModel(
                f"draft_vocab_size is {self.draft_vocab_size}; it must be from 1 to the target's "
                f"{self.target_vocab_size} tokens"
            )
        if self.num_heads % self.num_kv_heads:
            raise InvalidModel(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key/value heads"
            )
        if not self.own_embedding and self.hidden_size != self.target_hidden_size:
            raise InvalidModel(
                f"the head is {self.hidden_size} wide and has no embeddings of its own, but those "
                f"of the target are {self.target_hidden_size} wide"
            )
        if not self.feature_layers:
            raise InvalidModel("the head reads no layer of the target; name its layers")


def read_head_sizes(
    settings: Mapping[str, Any], what: str, types: tuple[str, ...]
) -> dict[str, Any]:
    """Read the fields of `HeadConfig` from config.json, except `feature_layers`."""
    nested = settings.get("transformer_layer_config")
    layer = nested if isinstance(nested, Mapping) else settings
    _check_layer(layer, what, types)
    hidden_size = checked_size(layer.get("hidden_size"), "hidden_size")
    num_heads = checked_size(layer.get("num_attention_heads"), "num_attention_heads")
    vocab_size = checked_size(layer.get("vocab_size"), "vocab_size")
    return {
        "target_hidden_size": optional_size(settings, "target_hidden_size", hidden_size),
        "target_vocab_size": vocab_size,
        "draft_vocab_size": optional_size(settings, "draft_vocab_size", vocab_size),
        "hidden_size": hidden_size,
        "intermediate_size": checked_size(layer.get("intermediate_size"), "intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": optional_size(layer, "num_key_value_heads", num_heads),
        "head_dim": optional_size(layer, "head_dim", max(1, hidden_size // num_heads)),
        "num_layers": optional_size(layer, "num_hidden_layers", 1),
        "norm_eps": read_positive_number(layer, "rms_norm_eps", 1e-6),
        "rope": read_rope_settings(layer),
        "max_positions": optional_size(layer, "max_position_embeddings", 2048),
    }


def _check_layer(layer: Mapping[str, Any], what: str, types: tuple[str, ...]) -> None:
    """Refuse layers with biases, of another model type or with another activation than SiLU."""
    for name in ("attention_bias", "mlp_bias"):
        if layer.get(name):
            raise InvalidModel(f"{what} with {name} is not supported")
    if layer.get("model_type", types[0]) not in types:
        raise InvalidModel(
            f"{what} with a layer of type {layer['model_type']!r:.40} is not supported, "
            f"only {types[0]}"
        )
    if layer.get("hidden_act", "silu") not in ("silu", "swish"):
        raise InvalidModel(
            f"{what} with hidden_act={layer['hidden_act']!r:.40} is not supported, only silu"
        )


def read_flag(settings: Mapping[str, Any], name: str) -> bool:
    """Return a boolean field of a configuration; a missing one is False."""
    value = settings.get(name, False)
    if not isinstance(value, bool | None):
        raise InvalidModel(f"config.json has {name}={value!r:.40}; it must be true or false")
    return bool(value)


def read_positive_number(settings: Mapping[str, Any], name: str, default: float) -> float:
    value = settings.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e12:
        raise InvalidModel(f"config.json has {name}={value!r:.40}; it must be a positive number")
    return float(value)


def read_rope_settings(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings, which older files spread over several fields."""
    found = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        raise InvalidModel(f"config.json has rotary settings {found!r:.60}; they must be an object")
    rope = {name: value for name, value in found.items() if name != "type"}
    rope["rope_type"] = found.get("rope_type", found.get("type", "default"))
    if "rope_theta" not in rope:
        rope["rope_theta"] = read_positive_number(layer, "rope_theta", 10000.0)
    read_positive_number(rope, "rope_theta", 10000.0)
    known = ("default", "linear", "llama3")
    if rope["rope_type"] not in known:
        raise InvalidModel(
            f"rotary embeddings of type {rope['rope_type']!r:.40} are not supported; supported "
            f"are {', '.join(known)}"
        )
    for name in ROPE_KEYS[rope["rope_type"]].split():
        read_positive_number(rope, name, 0.0)  # 0 is refused: it must be given
    return rope


def read_layers(listed: Any, name: str, offset: int = 0) -> tuple[int, ...]:
    """Return the layers that a field of config.json lists, with an offset added to each."""
    valid = isinstance(listed, list) and listed
    if not valid or not all(isinstance(i, int) and not isinstance(i, bool) for i in listed):
        raise InvalidModel(f"config.json has {name}={listed!r:.60}; it must list layers")
    return tuple(i + offset for i in listed)


def make_layer_settings(config: HeadConfig, model_type: str = "llama") -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope["rope_theta"],
        "rope_parameters": dict(config.rope),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": config.max_positions,
        "vocab_size": config.target_vocab_size,
    }


SPECULATORS_VERSION = "0.3.0"
"""Version of speculators' file format that is written."""


def make_speculators_form(
    config: HeadConfig,
    *,
    algorithm: str,
    architecture: str,
    layer: Mapping[str, Any],
    verifier: tuple[str, str],
    num_speculative_tokens: int,
) -> dict[str, Any]:
    """Return the fields of config.json that all methods of speculators have; vLLM reads them.

    Args:
        layer: settings of the decoder layers.
        verifier: name and architecture of the target.
    """
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_speculative_tokens,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": [architecture],
        "speculators_model_type": algorithm,
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": dict(layer),
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier[0], "architectures": [verifier[1]]},
        },
    }


Attend = Callable[
    [
        Float[Tensor, "*rows heads dim"],
        Float[Tensor, "*rows kv_heads dim"],
        Float[Tensor, "*rows kv_heads dim"],
    ],
    Float[Tensor, "*rows heads dim"],
]
"""Attention over rotated queries and keys, and values, of the rows of a pass.

It decides what a row sees and keeps what later rows are to see.
"""


class FeedForward(nn.Module):
    """The gated feed-forward of Llama."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class HeadModule(nn.Module):
    """A head with a draft vocabulary and rotary positions.

    Args:
        target_ids: target token of every draft token, ascending; None: the first
            `config.draft_vocab_size` ones.

    Attributes:
        d2t: target id minus draft id, per draft token.
        t2d: whether a target token can be drafted.
    """

    config: HeadConfig
    d2t: Tensor
    t2d: Tensor

    def __init__(
        self, config: HeadConfig, target_ids: Int64[Tensor, " draft_vocab"] | None = None
    ) -> None:
        super().__init__()
        own_ids = torch.arange(config.draft_vocab_size)
        if target_ids is None:
            target_ids = own_ids
        self.register_buffer("d2t", target_ids - own_ids.to(target_ids.device))
        t2d = torch.zeros(config.target_vocab_size, dtype=torch.bool, device=target_ids.device)
        self.register_buffer("t2d", t2d.index_fill_(0, target_ids, value=True))
        # No buffer: those are rounded when the head is converted to bf16.
        self.inv_freq, self.rope_scale = rotation(*rotary_sizes(config))

    @property
    def target_ids(self) -> Int64[Tensor, " draft_vocab"]:
        """The target's token id of every draft token."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def rotations(
        self, positions: Int64[Tensor, "*rows"], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the rotary embedding, [*rows, 1, head_dim] each."""
        angles = positions[..., None].float() * self.inv_freq.to(positions.device)
        angles = torch.cat([angles, angles], dim=-1)[..., None, :]
        return (
            (angles.cos() * self.rope_scale).to(dtype),
            (angles.sin() * self.rope_scale).to(dtype),
        )


def over_target_vocabulary(
    logits: Float[Tensor, "rows draft_vocab"],
    target_ids: Int64[Tensor, " draft_vocab"],
    target_vocab_size: int,
) -> Float[Tensor, "rows target_vocab"]:
    """Return logits over the target's tokens, with -inf at tokens outside the draft vocabulary."""
    if logits.shape[1] == target_vocab_size:
        return logits
    full = logits.new_full((len(logits), target_vocab_size), float("-inf"))
    return full.index_copy_(1, target_ids, logits)


def rotate(
    heads: Float[Tensor, "*rows heads dim"], cos: Tensor, sin: Tensor
) -> Float[Tensor, "*rows heads dim"]:
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin


def rotary_sizes(config: HeadConfig) -> tuple[Architecture, dict[str, Any]]:
    """Return the sizes that determine the rotary embedding, in the form of a decoder."""
    architecture = Architecture(
        name="LlamaForCausalLM",
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        vocab_size=config.draft_vocab_size,
        max_positions=config.max_positions,
    )
    return architecture, make_layer_settings(config)


ADVICE = "correct the sizes and flags in config.json, or fetch the head again"
EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
WEIGHT, SCALE = ".weight", ".weight_scale"
# Constants some files carry along, which every implementation computes itself.
IGNORED = ("rotary_emb.inv_freq",)
# Copies of the target's own matrices, which speculators keeps for training.
OF_TARGET = ("verifier_norm.", "verifier_lm_head.")
MAX_TARGET_VOCAB = 1 << 24
"""Tokens; the largest published vocabularies have 2^18."""


def read_head_tensors(folder: Path, renamed: Mapping[str, str]) -> dict[str, Tensor]:
    """Read the tensors of a head; `renamed` maps beginnings of names to those used here."""
    tensors: dict[str, Tensor] = {}
    stored = [(path, *item) for path in weight_files(folder) for item in read_tensors(path).items()]
    for path, name, tensor in stored:
        own = name.removeprefix("model.")
        if name.endswith(IGNORED) or own.startswith(OF_TARGET):
            continue
        for beginning, used in renamed.items():
            if own.startswith(beginning):
                own = used + own.removeprefix(beginning)
        if own in tensors:
            raise InvalidModel(f"{path} holds two tensors that stand for {own}")
        tensors[own] = tensor
    _dequantise(tensors, folder)
    return tensors


def _dequantise(tensors: dict[str, Tensor], folder: Path) -> None:
    """Replace matrices stored as int8, one scale per row, by their values in fp32."""
    for scale_name in [name for name in tensors if name.endswith(SCALE)]:
        name, scale = scale_name.removesuffix(SCALE) + WEIGHT, tensors.pop(scale_name)
        stored = tensors.get(name)
        if stored is None or stored.dtype != torch.int8 or scale.shape != (len(stored), 1):
            raise InvalidModel(f"{folder} has {scale_name} but no int8 {name} of as many rows")
        tensors[name] = stored.float() * scale.float()


def is_stored_in_int8(folder: Path) -> bool:
    """Whether the matrices of a head are stored as int8 with one scale per row."""
    return any(name.endswith(SCALE) for path in weight_files(folder) for name in read_tensors(path))


def read_target_ids(config: HeadConfig, tensors: Mapping[str, Tensor], where: str) -> Tensor:
    """Return the target token id of every draft token."""
    num_draft, num_target = config.draft_vocab_size, config.target_vocab_size
    d2t = tensors.get("d2t")
    if d2t is None:
        if num_draft == num_target:
            return torch.arange(num_target)
        raise InvalidModel(
            f"{where} drafts {num_draft} of {num_target} tokens but has no d2t that names them"
        )
    if d2t.shape != (num_draft,) or d2t.is_floating_point():
        raise InvalidModel(
            f"d2t in {where} is {d2t.dtype} of shape {tuple(d2t.shape)}; it must hold {num_draft} "
            "integers"
        )
    target_ids = d2t.long() + torch.arange(num_draft)
    outside = (target_ids < 0) | (target_ids >= num_target)
    if outside.any():
        first = int(outside.nonzero()[0])
        raise InvalidModel(
            f"d2t in {where} maps draft token {first} to {int(target_ids[first])}, outside the "
            f"target's {num_target} tokens (d2t holds offsets: target id minus draft id)"
        )
    if len(set(target_ids.tolist())) < num_draft:
        raise InvalidModel(
            f"d2t in {where} maps two draft tokens to one target token (d2t holds offsets: target "
            "id minus draft id)"
        )
    return target_ids


def fill_head(head: HeadModule, tensors: Mapping[str, Tensor], where: str) -> None:
    """Load checked tensors of a file into a head; refuse a t2d that contradicts d2t."""
    given = {**tensors, "d2t": head.d2t}
    found_t2d = given.get("t2d", head.t2d)
    if not torch.equal(found_t2d.bool(), head.t2d):
        raise InvalidModel(
            f"t2d in {where} marks {int(found_t2d.bool().sum())} tokens as drafted, but they are "
            f"not the {len(head.d2t)} tokens of d2t"
        )
    head.load_state_dict({**given, "t2d": head.t2d})


def check_head_tensors(
    config: HeadConfig,
    make: Callable[[], HeadModule],
    tensors: Mapping[str, Tensor],
    where: str,
) -> None:
    """Refuse missing, unknown or misshapen tensors, and an implausibly large vocabulary."""
    if config.target_vocab_size > MAX_TARGET_VOCAB:
        raise InvalidModel(
            f"config.json in {where} has vocab_size={config.target_vocab_size}; at most "
            f"{MAX_TARGET_VOCAB} are supported"
        )
    with torch.device("meta"):  # sizes that the tensors do not have take no memory
        expected = make().state_dict()
    maps = {name: expected[name] for name in ("d2t", "t2d")}
    check_tensors(expected, {**tensors, **maps}, where, advice=ADVICE)


def check_layers_of(what: str, config: HeadConfig, num_layers: int) -> None:
    """Refuse a head that reads layers which its target does not have (IncompatibleDraft)."""
    outside = [i for i in config.feature_layers if not 0 <= i <= num_layers]
    if outside:
        raise IncompatibleDraft(
            f"{what} reads layer {outside[0]} of its target, this target has {num_layers} layers: "
            "use a head that was trained for this target"
        )


def write_head_files(
    folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], *, as_int8: bool
) -> None:
    """Write config.json and the tensors; `as_int8`: matrices as int8 with an fp32 scale per row."""
    dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    written = dict(tensors)
    for name in [n for n, value in tensors.items() if n.endswith(WEIGHT) and value.ndim == 2]:
        if as_int8:
            matrix = written[name].float()
            scale = matrix.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
            written[name] = (matrix / scale).round().to(torch.int8)
            written[name.removesuffix(WEIGHT) + SCALE] = scale
    write_files(folder, {**settings, "dtype": dtype, "torch_dtype": dtype}, WEIGHTS, written)
