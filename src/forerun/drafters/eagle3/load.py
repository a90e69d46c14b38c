"""Loading of an EAGLE-3 head for a target; its flags must reproduce the golden rows from training.

Flags and layer ids of EAGLE-3 checkpoints are written differently by different tools, and a mistake
costs acceptance without any error. So the training code keeps a few golden rows with the head, from
the target's features to the logits, with every tensor in between. They are computed again under the
flags of config.json. Where they differ, the check tries the other flags, layers and vocabulary maps
that tools are known to write for the same weights. The first combination that gives the rows is
used and reported. Where none does, the head is refused, naming the first tensor that differs.
The file is in the form of safetensors under another ending: vLLM reads every file that ends in
.safetensors as weights, and refuses tensors that it does not know.

Tensors are named as speculators names them (`layers.0.*`); the raw form of EAGLE, SpecForge and
SGLang calls the layer `midlayer`. Everything is checked: a tensor too many or too few, a wrong
shape or a draft vocabulary outside the target's is an error, because other engines fail silently
there.
"""

from __future__ import annotations

import copy
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from forerun.atomic_write import atomic_write
from forerun.bounded_read import parse_json
from forerun.drafters.base import check_made_for
from forerun.drafters.eagle3.drafter import (
    AttachedModel,
    Eagle3Drafter,
    Eagle3Model,
    NativeEagle3Model,
)
from forerun.drafters.eagle3.head import (
    Eagle3Config,
    Eagle3Head,
    config_of,
    is_eagle3,
    names_layers,
    origin_of_layers,
    raw_settings,
    speculators_settings,
)
from forerun.errors import IncompatibleDraft, InvalidModel, RunnerUnavailable
from forerun.models.base import Context, LanguageModel, StoredModel, pack
from forerun.models.checkpoint import WEIGHTS, read_object, weight_files
from forerun.models.runner.native import NativeModel
from forerun.models.tensor_files import check_tensors, read_tensors, write_files, writing_tensors

HeadFormat = Literal["speculators", "raw"]
ADVICE = "correct the sizes and flags in config.json, or fetch the head again"
LAYER, RAW_LAYER = "layers.0.", "midlayer."
EMBEDDING = "embed_tokens.weight"
# Constants some files carry along, which every implementation computes itself.
IGNORED = ("rotary_emb.inv_freq",)
# Copies of the target's own matrices, which speculators keeps for training.
OF_TARGET = ("verifier_norm.", "verifier_lm_head.")
MAX_TARGET_VOCAB = 1 << 24
"""Tokens; the largest published vocabularies have 2^18."""


def read_eagle3_head(folder: Path, *, num_target_layers: int | None = None) -> Eagle3Head:
    """Read an EAGLE-3 head in speculators' form or in the raw form, with weights in fp32."""
    config, tensors = read_parts(folder, num_target_layers=num_target_layers)
    return build_head(config, tensors, str(folder)).float()


def read_parts(
    folder: Path, *, num_target_layers: int | None = None
) -> tuple[Eagle3Config, dict[str, Tensor]]:
    """Read configuration and tensors of a head, without a check that they fit each other."""
    settings = read_object(folder / "config.json")
    if not is_eagle3(settings):
        raise InvalidModel(f"{folder / 'config.json'} does not describe an EAGLE-3 head")
    tensors = _read_tensors(folder)
    own_embedding = EMBEDDING in tensors
    config = config_of(settings, num_target_layers=num_target_layers, own_embedding=own_embedding)
    return config, tensors


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    stored = [(path, *item) for path in weight_files(folder) for item in read_tensors(path).items()]
    for path, name, tensor in stored:
        own = name.removeprefix("model.")
        if name.endswith(IGNORED) or own.startswith(OF_TARGET):
            continue
        if own.startswith(RAW_LAYER):
            own = LAYER + own.removeprefix(RAW_LAYER)
        if own in tensors:
            raise InvalidModel(f"{path} holds two tensors that stand for {own}")
        tensors[own] = tensor
    return tensors


def build_head(config: Eagle3Config, tensors: Mapping[str, Tensor], where: str) -> Eagle3Head:
    if config.target_vocab_size > MAX_TARGET_VOCAB:
        raise InvalidModel(
            f"config.json in {where} has vocab_size={config.target_vocab_size}; at most "
            f"{MAX_TARGET_VOCAB} are supported"
        )
    with torch.device("meta"):  # sizes that the tensors do not have take no memory
        expected = Eagle3Head(config).state_dict()
    maps = {name: expected[name] for name in ("d2t", "t2d")}
    check_tensors(expected, {**tensors, **maps}, where, advice=ADVICE)
    head = Eagle3Head(config, _target_ids_of(config, tensors, where))
    given = {**tensors, "d2t": head.d2t}
    found_t2d = given.get("t2d", head.t2d)
    if not torch.equal(found_t2d.bool(), head.t2d):
        raise InvalidModel(
            f"t2d in {where} marks {int(found_t2d.bool().sum())} tokens as drafted, but they are "
            f"not the {len(head.d2t)} tokens of d2t"
        )
    head.load_state_dict({**given, "t2d": head.t2d})
    return head.eval()


def _target_ids_of(config: Eagle3Config, tensors: Mapping[str, Tensor], where: str) -> Tensor:
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


def write_eagle3_head(
    head: Eagle3Head,
    folder: Path,
    *,
    form: HeadFormat = "speculators",
    target: str,
    target_architecture: str = "LlamaForCausalLM",
    num_speculative_tokens: int = 5,
) -> None:
    """Write a head in its own dtype: first config.json, then model.safetensors."""
    settings: dict[str, Any]
    if form == "speculators":
        settings = speculators_settings(
            head.config,
            target=target,
            target_architecture=target_architecture,
            num_speculative_tokens=num_speculative_tokens,
        )
    else:
        settings = raw_settings(head.config)
    dtype = str(head.fc.weight.dtype).removeprefix("torch.")
    settings |= {"dtype": dtype, "torch_dtype": dtype}
    tensors = {renamed(name, form): value for name, value in head.state_dict().items()}
    write_files(folder, settings, WEIGHTS, tensors)


def renamed(name: str, form: HeadFormat) -> str:
    if form == "raw" and name.startswith(LAYER):
        return RAW_LAYER + name.removeprefix(LAYER)
    return name


GOLDEN_FILE = "golden.rows"
FORMER_GOLDEN_FILE = "golden.safetensors"
NUM_CHAIN = 3
"""Rows at the end that continue from the head's own states."""
STAGES = ("fused", "joined", "attended", "output", "logits", "chain_states", "chain_logits")
"""Tensors of the computation in the order in which they arise."""
NEEDED = ("tokens", "features", "embedded", "top_tokens", *STAGES)

Embed = Callable[[Int64[Tensor, " rows"]], Float[Tensor, "rows width"]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GoldenRows:
    """Inputs, intermediate results and outputs of a head on a short text, kept from its training.

    Attributes:
        tokens: of the text; row t reads token t + 1, so there is one more than rows.
        top_tokens: the target's id of every row's most likely token.
        fingerprints: one number per weight, by its name, so that a changed weight can be named.
    """

    tokens: Int64[Tensor, " tokens"]
    features: Float[Tensor, "rows layers target_width"]
    embedded: Float[Tensor, "all_rows width"]
    top_tokens: Int64[Tensor, " all_rows"]
    stages: Mapping[str, Tensor]
    fingerprints: Mapping[str, float]


@torch.no_grad()
def compute_rows(
    head: Eagle3Head,
    features: Float[Tensor, "rows layers target_width"],
    embedded: Float[Tensor, "all_rows width"],
) -> dict[str, Tensor]:
    """Return the tensors of `STAGES` and `top_tokens`, in fp32."""
    kept: dict[str, Tensor] = {}
    layer = head.get_submodule("layers.0")
    hooks = [
        layer.get_submodule("self_attn").register_forward_pre_hook(
            lambda _, given: kept.update(joined=given[0])
        ),
        layer.get_submodule("post_attention_layernorm").register_forward_pre_hook(
            lambda _, given: kept.update(attended=given[0])
        ),
    ]
    fused = head.fuse(features)
    states = [*fused]
    while True:
        rows = len(states)
        output = head(embedded[:rows], torch.stack(states), torch.arange(rows), causal)
        if rows == len(embedded):
            break
        states.append(head.fed_back(output[-1]))
    for hook in hooks:
        hook.remove()
    logits = head.logits(output)
    first = len(fused)
    return {
        "fused": fused,
        "joined": kept["joined"][:first],
        "attended": kept["attended"][:first],
        "output": output[:first],
        "logits": logits[:first],
        "chain_states": torch.stack(states[first:]),
        "chain_logits": logits[first:],
        "top_tokens": head.target_ids[logits.argmax(-1)],
    }


def causal(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute causal attention of rows over themselves and earlier rows, without a cache."""
    attended = F.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        is_causal=True,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)


def fingerprint(tensor: Tensor) -> float:
    """Return the fingerprint of a tensor: its inner product with fixed non-repeating numbers."""
    values = tensor.double().flatten()
    factors = torch.cos(torch.arange(len(values), dtype=torch.float64) * 0.7548776662466927)
    return float(values @ factors)


def write_golden(
    head: Eagle3Head,
    folder: Path,
    *,
    tokens: Int64[Tensor, " tokens"],
    features: Float[Tensor, "tokens layers target_width"],
    embed: Embed,
) -> None:
    """Compute the golden rows of a head, by which it is checked when loaded, and write them."""
    rounded = copy.deepcopy(head).to(torch.bfloat16).float().cpu().eval()
    rows = tokens[1:].cpu()
    embedded = rounded.embed_tokens(rows) if rounded.embed_tokens is not None else embed(rows)
    given = features[: len(rows) - NUM_CHAIN].float().cpu()
    embedded = embedded.detach().float().cpu()
    tensors = {
        "tokens": tokens.cpu(),
        "features": given,
        "embedded": embedded,
        **compute_rows(rounded, given, embedded),
    }
    marks = {name: fingerprint(tensor) for name, tensor in rounded.state_dict().items()}
    with atomic_write(folder / GOLDEN_FILE) as scratch, writing_tensors():
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            scratch,
            metadata={"format": "1", "fingerprints": json.dumps(marks)},
        )


MAX_GOLDEN_BYTES = 1 << 28


def _check_ranks(tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a tensor has another number of dimensions than golden rows have."""
    for name in NEEDED:
        wanted = {"tokens": 1, "top_tokens": 1, "features": 3}.get(name, 2)
        if tensors[name].dim() != wanted:
            raise ValueError(f"{name} has {tensors[name].dim()} dimensions instead of {wanted}")
    num_rows = len(tensors["features"])
    if not 1 <= num_rows <= len(tensors["embedded"]) < len(tensors["tokens"]):
        raise ValueError(f"{num_rows} rows do not fit {len(tensors['tokens'])} tokens")


def read_golden(folder: Path) -> GoldenRows | None:
    """Read the golden rows in the folder of a head; None if there are none."""
    if (folder / FORMER_GOLDEN_FILE).is_file():
        raise InvalidModel(
            f"{folder / FORMER_GOLDEN_FILE} would be read as weights by vLLM: rename it to "
            f"{GOLDEN_FILE}"
        )
    path = folder / GOLDEN_FILE
    if not path.is_file():
        return None
    try:
        tensors = read_tensors(path, max_bytes=MAX_GOLDEN_BYTES)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        _check_ranks(tensors)
        fingerprints = parse_json(metadata["fingerprints"], "fingerprints")
        return GoldenRows(
            tokens=tensors["tokens"],
            features=tensors["features"],
            embedded=tensors["embedded"],
            top_tokens=tensors["top_tokens"],
            stages={name: tensors[name] for name in STAGES},
            fingerprints={str(name): float(value) for name, value in fingerprints.items()},
        )
    except (
        *(InvalidModel, SafetensorError, OSError),
        *(KeyError, TypeError, ValueError, AttributeError),
    ) as error:
        raise InvalidModel(
            f"the golden rows in {path} cannot be read ({error}); fetch the head again"
        ) from error


MAX_ROW_ERROR = 5e-3
"""Largest difference from a golden tensor, relative to its root mean square; both are in fp32."""
MAX_FEATURE_ERROR = 0.1
"""Largest relative difference of the target's features, which may be computed in bf16."""

CAUSES: Mapping[str, str] = MappingProxyType(
    {
        "fused": "fc, input_norm or fc_norm, or the order of the target's layers",
        "joined": "input_layernorm, hidden_norm or the embedding",
        "attended": "the attention: projections, heads, rotary settings or the norms' epsilon",
        "output": "post_attention_layernorm or the feed-forward",
        "logits": "norm or lm_head",
        "chain_states": "what is fed back (norm_output)",
        "chain_logits": "the rows that continue from the head's own states",
        "top_tokens": "d2t, which names the target's token of every draft token",
    }
)
"""Probable fault by the first golden tensor that differs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GateReport:
    """A checked head, and the settings of config.json that its golden rows contradict.

    Attributes:
        changes: readings that differ from config.json, in words; empty where the file is right.
    """

    head: Eagle3Head
    changes: tuple[str, ...] = ()
    is_checked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadReading:
    """One combination of flags, layers and vocabulary map under which a head may be built."""

    config: Eagle3Config
    tensors: Mapping[str, Tensor]
    changes: tuple[str, ...]


def _check_head(
    config: Eagle3Config,
    tensors: Mapping[str, Tensor],
    where: str,
    *,
    golden: GoldenRows | None,
    target: LanguageModel,
) -> GateReport:
    if golden is None:
        return GateReport(head=build_head(config, tensors, where))
    if golden.features.shape[1:] != (len(config.feature_layers), config.target_hidden_size):
        raise InvalidModel(
            f"the golden rows in {where} have features of {golden.features.shape[1]} layers, "
            f"{golden.features.shape[2]} wide; config.json names {len(config.feature_layers)} "
            f"layers, {config.target_hidden_size} wide"
        )
    head, changes = _matching_head(config, tensors, where, golden)
    found = _matching_layers(config, where, golden, target)
    if found != config.feature_layers:
        changes += (f"feature layers {list(found)} instead of {list(config.feature_layers)}",)
        head.config = replace(head.config, feature_layers=found)
    return GateReport(head=head, changes=changes, is_checked=True)


def _matching_head(
    config: Eagle3Config, tensors: Mapping[str, Tensor], where: str, golden: GoldenRows
) -> tuple[Eagle3Head, tuple[str, ...]]:
    refusal: InvalidModel | None = None
    for reading in readings(config, tensors):
        try:
            head = build_head(reading.config, reading.tensors, where)
        except InvalidModel as error:
            refusal = refusal or error
            continue
        if first_difference(head, golden) is None:
            return head, reading.changes
        if not reading.changes:
            refusal = InvalidModel(_describe_difference(head, golden, where))
    assert refusal is not None
    raise refusal


def readings(config: Eagle3Config, tensors: Mapping[str, Tensor]) -> Iterator[HeadReading]:
    """Yield the settings under which a head may be built, those of config.json first."""
    d2t = tensors.get("d2t")
    absolute = None
    if d2t is not None and d2t.dim() == 1 and not d2t.is_floating_point():
        absolute = d2t.long() - torch.arange(len(d2t))
    both = (False, True)
    for is_absolute, *flips in product(both if absolute is not None else both[:1], both, both):
        names = ("norm_output", "norm_before_residual")
        flipped: dict[str, Any] = {
            n: not getattr(config, n) for n, is_so in zip(names, flips, strict=True) if is_so
        }
        changes = [f"{name}={value}" for name, value in flipped.items()]
        given = tensors
        if is_absolute and absolute is not None:
            given = {**tensors, "d2t": absolute}
            changes.append("d2t holds target ids instead of offsets")
        yield HeadReading(config=replace(config, **flipped), tensors=given, changes=tuple(changes))


def first_difference(head: Eagle3Head, golden: GoldenRows) -> str | None:
    """Return the first tensor that differs from the golden rows; None if all agree."""
    found = compute_rows(head, golden.features, golden.embedded)
    for name in STAGES:
        expected = golden.stages[name]
        if found[name].shape != expected.shape or _error_of(found[name], expected) > MAX_ROW_ERROR:
            return name
    return None if torch.equal(found["top_tokens"], golden.top_tokens) else "top_tokens"


def _error_of(found: Tensor, expected: Tensor) -> float:
    scale = float(expected.double().square().mean().sqrt())
    error = float((found - expected).abs().max()) / max(scale, 1e-30)
    return error if error == error else float("inf")


def _describe_difference(head: Eagle3Head, golden: GoldenRows, where: str) -> str:
    name = first_difference(head, golden)
    assert name is not None
    changed = [
        weight
        for weight, tensor in head.state_dict().items()
        if not math.isclose(
            fingerprint(tensor),
            golden.fingerprints.get(weight, math.nan),
            rel_tol=1e-6,
            abs_tol=1e-6,
        )
    ]
    hint = f"changed weights: {', '.join(changed)}" if changed else "no weight has changed"
    return (
        f"the EAGLE-3 head in {where} does not compute its golden rows under any known reading of "
        f"its flags: the first tensor that differs is {name!r}, which points to {CAUSES[name]} "
        f"({hint}); correct config.json or fetch the head again"
    )


def _matching_layers(
    config: Eagle3Config, where: str, golden: GoldenRows, target: LanguageModel
) -> tuple[int, ...]:
    """Return the layers of the target whose input equals the features in the golden rows."""
    if not config.own_embedding:
        embedded = target.embed(golden.tokens[1:].to(target.device)).float().cpu()
        if embedded.shape != golden.embedded.shape or (
            _error_of(embedded, golden.embedded) > MAX_FEATURE_ERROR
        ):
            raise IncompatibleDraft(
                f"the EAGLE-3 head in {where} was trained for another target: its golden rows hold "
                "other embeddings than this target's; use a head that was trained for this target"
            )
    features = target_features(golden, target)
    found = []
    for index, labelled in enumerate(config.feature_layers):
        expected = golden.features[:, index, None]
        errors = ((features - expected).norm(dim=2) / expected.norm(dim=2)).mean(dim=0)
        layer = int(errors.argmin())
        if not float(errors[layer]) <= MAX_FEATURE_ERROR:
            raise IncompatibleDraft(
                f"the EAGLE-3 head in {where} was trained for another target: of its golden rows "
                f"the input of layer {labelled} is not that of any layer of this target (the "
                f"nearest, {layer}, differs by {float(errors[layer]):.0%}); use a head that was "
                "trained for this target"
            )
        found.append(layer)
    return tuple(found)


@torch.inference_mode()
def target_features(
    golden: GoldenRows, target: LanguageModel
) -> Float[Tensor, "rows layers width"]:
    """Run the target over the golden rows' tokens; returns the inputs of all its layers."""
    ids = golden.tokens[: len(golden.features)].tolist()
    if not 0 <= min(ids) <= max(ids) < target.vocab_size:
        raise IncompatibleDraft(
            f"the golden rows hold token {max(ids)}; the target has {target.vocab_size} tokens"
        )
    context = Context(target.store, ids)
    try:
        batch = pack([context.span(len(ids))], ids, [], target.device)
        layers = tuple(range(target.num_layers + 1))
        features = target.forward(replace(batch, feature_layers=layers)).features
    finally:
        context.close()
    assert features is not None
    return features.float().cpu()


logger = logging.getLogger("forerun.loading")


def load_eagle3(folder: Path, target: LanguageModel) -> Eagle3Drafter:
    report = examine(folder, target)
    if not report.head.config.own_embedding:  # a target without one is refused before any request
        target.embed(torch.zeros(1, dtype=torch.int64, device=target.device))
    for change in report.changes:
        logger.warning(
            "the EAGLE-3 head in %s is read with %s: its golden rows show it", folder, change
        )
    if not report.is_checked:
        settings = read_object(folder / "config.json")
        logger.log(
            logging.INFO if names_layers(settings) else logging.WARNING,
            "the EAGLE-3 head in %s has no golden rows: its flags are not checked, and %s",
            folder,
            origin_of_layers(settings, report.head.config.feature_layers),
        )
    dtype = target.dtype if isinstance(target, StoredModel) else torch.float32
    head = report.head.to(device=target.device, dtype=dtype).requires_grad_(False)
    return Eagle3Drafter(model_of(head, target), head.config.feature_layers, target.vocab_size)


def examine(folder: Path, target: LanguageModel) -> GateReport:
    """Read a head and check it by its golden rows."""
    where = str(folder)
    config, tensors = read_parts(folder, num_target_layers=target.num_layers)
    sizes = (config.target_hidden_size, config.target_vocab_size)
    check_made_for(f"the EAGLE-3 head in {where} was", sizes, target)
    report = _check_head(config, tensors, where, golden=read_golden(folder), target=target)
    check_layers(report.head.config, target, where)  # golden rows may have corrected the layers
    return report


def model_of(head: Eagle3Head, target: LanguageModel) -> AttachedModel:
    if isinstance(target, NativeModel):
        try:
            return NativeEagle3Model(head, target)
        except RunnerUnavailable as error:
            logger.info("the EAGLE-3 head runs in torch: %s", error)
    return Eagle3Model(head, target)


def check_layers(config: Eagle3Config, target: LanguageModel, where: str) -> None:
    """Refuse a head that reads layers beyond those of the target."""
    outside = [i for i in config.feature_layers if not 0 <= i <= target.num_layers]
    if outside:
        raise IncompatibleDraft(
            f"the EAGLE-3 head in {where} reads layer {outside[0]} of its target, this target has "
            f"{target.num_layers} layers: use a head that was trained for this target"
        )
