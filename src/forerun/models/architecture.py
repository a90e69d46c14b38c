"""Sizes of a model, read from its configuration before any weight is read, and runners."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from forerun.errors import InvalidModel
from forerun.models.families import find_family
from forerun.models.family import Family, States

UNLIMITED = 1 << 17
"""Context length of models whose configuration names none."""

LATENT_KEYS = ("qk_nope_head_dim", "qk_rope_head_dim")

ROPE_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "default": "",
        "dynamic": "factor alpha beta_fast beta_slow mscale mscale_all_dim",
        "linear": "factor",
        "llama3": "factor low_freq_factor high_freq_factor original_max_position_embeddings",
        "longrope": "factor attention_factor short_factor long_factor short_mscale long_mscale "
        "original_max_position_embeddings",
        "proportional": "factor",
        "yarn": "factor attention_factor beta_fast beta_slow mscale mscale_all_dim truncate "
        "original_max_position_embeddings llama_4_scaling_beta max_position_embeddings",
    }
)
"""Types of rotary embeddings, with the settings of each beside `ANY_ROPE_KEYS`."""
ROPE_TYPES = tuple(ROPE_KEYS)
ANY_ROPE_KEYS = "rope_type type rope_theta partial_rotary_factor mrope_section mrope_interleaved"
ORIGINAL = "original_max_position_embeddings"

LAYER_COUNTS = ("num_hidden_layers", "n_layer")
MAX_LAYERS = 4096
"""Most layers of a configuration: transformers creates an object per layer at the start."""
MAX_SIZE = 1 << 31

LAYER_TYPES = ("full_attention", "sliding_attention")
RECURRENT_TYPES = ("linear_attention", "conv", "mamba", "hybrid")
"""Layers with a recurrent state; "hybrid" ones have keys and values too."""
ATTENDING_TYPES = ("attention", "hybrid", *LAYER_TYPES)

# Settings that make of a supported model one whose output we would not reproduce.
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "add_cross_attention": "attention to an encoder",
        "is_encoder_decoder": "an encoder",
        "use_bidirectional_attention": "attention to later tokens",
        "alibi": "scores that fall with the distance (ALiBi)",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The sizes of a supported model.

    Attributes:
        learned_positions: whether positions are looked up in a table of `max_positions` rows.
        position_limit: why no text may be longer than `max_positions`; None: results only get worse
            past them.
        windows: how many positions back layers see, their own included; None: all. Each value once,
            in the order of the first layer that has it.
        attention_layers: layers with keys and values; None: all.
        recurrent: class of the recurrent layers in transformers; None: there are none.
        state_sizes: elements of the recurrent states of all layers after one token: of the
            convolutions, in the dtype of the model, and of the recurrences, in fp32.
    """

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    learned_positions: bool = False
    position_limit: str | None = None
    windows: tuple[int | None, ...] = (None,)
    attention_layers: tuple[int, ...] | None = None
    recurrent: str | None = None
    state_sizes: tuple[int, int] = (0, 0)

    @property
    def num_attention_layers(self) -> int:
        return self.num_layers if self.attention_layers is None else len(self.attention_layers)

    @property
    def kv_token_elements(self) -> int:
        """Number of elements of the keys and values of one token, over all layers."""
        return 2 * self.num_attention_layers * self.num_kv_heads * self.head_dim


def read_architecture(name: str, settings: Mapping[str, Any]) -> Architecture:
    """Check that a model is supported and return its sizes.

    `settings` is its configuration as transformers normalises it (`config.to_dict()`).

    Raises:
        InvalidModel: the model, or something its configuration asks for, is not supported.
    """
    family = find_family(name)
    states = family.states
    _refuse_quantised(settings)
    _refuse_settings(name, settings)
    ropes = _check_ropes(name, settings)
    hidden_size = size(settings, "hidden_size", "n_embd")
    kinds, state_sizes = None, (0, 0)
    if states is not None:
        kinds = _list_kinds(settings)
        state_sizes = count_states(states, settings, kinds)
        settings = _fill_recurrent(states, settings)
    num_heads = size(settings, "num_attention_heads", "n_head")
    max_positions, position_limit = _limit_positions(family, settings, ropes)
    num_kv_heads, head_dim = _read_heads(family, settings, num_heads, hidden_size)
    return Architecture(
        name=name,
        num_layers=size(settings, "num_hidden_layers", "n_layer"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        vocab_size=size(settings, "vocab_size", "vocab_size"),
        max_positions=max_positions,
        learned_positions=family.positions == "table",
        position_limit=position_limit,
        windows=_read_windows(family, settings),
        attention_layers=None
        if kinds is None
        else tuple(index for index, kind in enumerate(kinds) if kind in ATTENDING_TYPES),
        recurrent=None if states is None else states.module,
        state_sizes=state_sizes,
    )


def _read_heads(
    family: Family, settings: Mapping[str, Any], num_heads: int, hidden_size: int
) -> tuple[int, int]:
    """Return the key/value heads of a layer and their width; the most where layers differ."""
    given = {} if family.heads == "each" else settings
    num_kv_heads = optional_size(given, "num_key_value_heads", num_heads)
    head_dim = optional_size(given, "head_dim", max(1, hidden_size // num_heads))
    if family.heads == "latent":
        num_kv_heads = num_heads
        head_dim = sum(checked_size(settings.get(key), key) for key in LATENT_KEYS)
    if family.heads == "falcon":
        shared = 1 if settings.get("multi_query") else num_heads
        has_groups = settings.get("new_decoder_architecture")
        num_kv_heads = optional_size(settings, "num_kv_heads", num_heads) if has_groups else shared
    if family.heads == "doubled" and "sliding_attention" in settings["layer_types"]:
        num_kv_heads *= 2
    layers = (settings.get("per_layer_config") or {}).values()
    heads = [num_kv_heads, *(optional_size(at, "num_key_value_heads", 1) for at in layers)]
    for fewer in heads:
        if num_heads % fewer or max(heads) % fewer:
            raise InvalidModel(
                f"{num_heads} attention heads cannot share {fewer} key/value heads "
                "(num_attention_heads, num_key_value_heads)"
            )
    return max(heads), max(head_dim, *(optional_size(at, "head_dim", 1) for at in layers), 1)


def check_trainable(architecture: Architecture) -> None:
    """Refuse models with recurrent layers, whose states would run on into the next packed text."""
    if architecture.recurrent is not None:
        raise InvalidModel(
            f"{architecture.name} has recurrent layers, with which alignment does not work: draft "
            "for it with suffix, recycling or a model that is trained already"
        )


def _fill_recurrent(states: States, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration with what models with recurrent layers may leave out."""
    kinds = settings.get("layers_block_type")
    given = dict(settings)
    if given.get("num_hidden_layers") is None and isinstance(kinds, list):
        given["num_hidden_layers"] = len(kinds)
    if given.get("max_position_embeddings") is None:
        given["max_position_embeddings"] = UNLIMITED
    if not states.attends:
        given |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 1}
    return given


def _list_kinds(settings: Mapping[str, Any]) -> Sequence[str]:
    given = settings.get("layer_types") or settings.get("layers_block_type")
    if given:
        return list(given)
    layers = range(checked_size(settings.get("num_hidden_layers"), "num_hidden_layers"))
    if "mamba_d_ssm" in settings and "attn_layer_indices" not in settings:
        return ["hybrid" for _ in layers]
    attending = settings.get("attn_layer_indices") or ()
    if (period := settings.get("attn_layer_period")) is not None:
        attending = [i for i in layers if i % period == settings["attn_layer_offset"]]
    return ["full_attention" if i in attending else "linear_attention" for i in layers]


def count_states(
    states: States, settings: Mapping[str, Any], kinds: Sequence[str]
) -> tuple[int, int]:
    """Return `Architecture.state_sizes`, worked out from the configuration alone."""
    *sizes, kernel = [checked_size(settings.get(key), key) for key in states.sizes]
    match states.kind, sizes:
        case "convolution", [channels]:
            recurrent = 0
        case "kimi", [heads, width]:
            channels, recurrent = 3 * heads * width, heads * width * width
        case "mamba2", [heads, width, state, groups]:
            channels = heads * width + 2 * groups * state
            recurrent = heads * width * state
        case "delta", [key_heads, heads, key_width, width]:
            channels = 2 * key_heads * key_width + heads * width
            recurrent = heads * key_width * width
        case _:  # "mamba": the width, or two factors of it, and the state
            channels, recurrent = math.prod(sizes[:-1]), math.prod(sizes)
    num_layers = sum(kind in RECURRENT_TYPES for kind in kinds)
    return num_layers * channels * kernel, num_layers * recurrent


def size(settings: Mapping[str, Any], name: str, gpt2_name: str) -> int:
    """Return a size that is stored under its usual name or under GPT-2's name for it."""
    key = name if name in settings else gpt2_name
    return checked_size(settings.get(key), key)


def optional_size(settings: Mapping[str, Any], name: str, default: int) -> int:
    """Return an optional size, or `default` if the configuration has none."""
    value = settings.get(name)
    return default if value is None else checked_size(value, name)


def checked_size(value: Any, name: str) -> int:
    """Check that a value of a configuration is an integer in the range of a size.

    Raises InvalidModel where it is not.
    """
    most = MAX_LAYERS if name in LAYER_COUNTS else MAX_SIZE
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InvalidModel(f"config.json has {name}={value!r:.60}; it must be from 1 to {most}")
    return value


def check_layer_count(settings: Mapping[str, Any]) -> None:
    """Refuse a configuration whose number of layers transformers could not handle."""
    for name in LAYER_COUNTS:
        if name in settings:
            checked_size(settings[name], name)


def _read_windows(family: Family, settings: Mapping[str, Any]) -> tuple[int | None, ...]:
    name, window = family.name, settings.get("sliding_window")
    kinds = settings.get("layer_types")
    if window is not None and (kinds is None or "sliding_attention" in kinds):
        checked_size(window, "sliding_window")
        longest = settings.get("max_position_embeddings", UNLIMITED)
        if family.windows == "masked" and window < longest:
            raise InvalidModel(
                f"{name} with sliding_window={window} is not supported: its window is in the mask "
                "alone; supported are models of this class whose window is the whole context"
            )
        is_used = settings.get("use_sliding_window")
        if family.windows == "stated" and kinds and not is_used:
            raise InvalidModel(  # transformers' attention functions disagree on what that means
                f"{name} has layers of type 'sliding_attention' and use_sliding_window=False; "
                "config.json must say either that they have a window or that they have none"
            )
    if kinds is None:
        return (window,)
    known: tuple[str, ...] = LAYER_TYPES
    if family.states is not None:
        known = (*LAYER_TYPES, *RECURRENT_TYPES)
    elif family.positions == "chunked":
        known = (*LAYER_TYPES, "chunked_attention")
    for kind in kinds:
        if kind not in known:
            raise InvalidModel(
                f"{name} with layers of type {kind!r} is not supported; "
                f"supported are {', '.join(known)}"
            )
    return tuple(dict.fromkeys(window if kind == "sliding_attention" else None for kind in kinds))


def _refuse_quantised(settings: Mapping[str, Any]) -> None:
    """Refuse quantised weights; those that `ModelFiles` reads are no longer in the settings."""
    quantisation = settings.get("quantization_config")
    if quantisation:
        known = isinstance(quantisation, Mapping)
        method = quantisation.get("quant_method", "unnamed") if known else repr(quantisation)[:60]
        raise InvalidModel(
            f"quantised checkpoints ({method}) are not supported; use the bf16 or fp32 weights"
        )


def _refuse_settings(name: str, settings: Mapping[str, Any]) -> None:
    """Refuse options that the attention implemented here does not have."""
    for setting, meaning in REFUSED.items():
        if settings.get(setting) not in (None, False, "vision"):  # which is none, of text
            raise InvalidModel(
                f"{name} with {meaning} ({setting}={settings[setting]}) is not supported"
            )


def _check_ropes(name: str, settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rotary embeddings of a configuration; refuse unknown ones and unknown settings."""
    parameters = settings.get("rope_parameters") or {}
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    ropes = nested or [parameters]
    for rope in ropes:
        kind = rope.get("rope_type", "default")
        if kind not in ROPE_KEYS:
            raise InvalidModel(
                f"{name} with rope_type {kind!r} is not supported; "
                f"supported are {', '.join(ROPE_TYPES)}"
            )
        unknown = sorted(rope.keys() - f"{ANY_ROPE_KEYS} {ROPE_KEYS[kind]}".split())
        if unknown:
            raise InvalidModel(
                f"{name} has rope_scaling with {', '.join(unknown)}, which rope_type {kind!r} does "
                f"not have; it has {', '.join(ROPE_KEYS[kind].split()) or 'no settings'}"
            )
    return ropes


def _limit_positions(
    family: Family, settings: Mapping[str, Any], ropes: Sequence[Mapping[str, Any]]
) -> tuple[int, str | None]:
    """Return `Architecture.max_positions` and `Architecture.position_limit`.

    transformers rotates a whole pass by the longest position in it where longrope and dynamic
    rescale, so the text would depend on how it is cut into passes.
    """
    longest = size(settings, "max_position_embeddings", "n_positions")
    if family.positions == "table":
        return longest, "its positions are rows of a table"
    if family.positions == "chunked":
        # Every layer sees all of the first chunk, and no scores are tempered before floor_scale.
        chunk = optional_size(settings, "attention_chunk_size", longest)
        tempered = optional_size(settings, "floor_scale", longest + 1)
        longest = min(longest, chunk, max(1, tempered - 1))
        return longest, "past them its layers attend in chunks, which is not supported"
    long = [rope for rope in ropes if rope.get("rope_type") == "longrope"]
    if originals := [optional_size(rope, ORIGINAL, longest) for rope in long]:
        reason = "past them longrope rotates every key of the text anew, which kept keys cannot be"
        return min(longest, *originals), reason
    if any(rope.get("rope_type") == "dynamic" and not rope.get("alpha") for rope in ropes):
        reason = "past them dynamic rotary embeddings depend on how a text is cut into passes"
        return longest, reason
    return longest, None


Runner = Literal["auto", "native", "graphs", "eager"]
"""native: our own CPU kernels. graphs: lean torch passes, recorded as CUDA graphs on CUDA. eager:
transformers' own modules. auto: the fastest that the device and the model allow."""

WeightFormat = Literal["auto", "bf16", "int8", "int4", "int4-int8"]
"""Bits of the weight matrices: as stored, bf16, or fewer with a scale per group of inputs.

"int4-int8" has an output layer of 8 bits. Embeddings and norms stay in the model's dtype.
"""

WEIGHT_FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)
QUANTISED: Mapping[WeightFormat, tuple[int, int]] = MappingProxyType(
    {"int8": (8, 8), "int4": (4, 4), "int4-int8": (4, 8)}
)
"""Bits of the matrices of the layers, and of the output layer."""

RUNNERS: tuple[Runner, ...] = get_args(Runner)
