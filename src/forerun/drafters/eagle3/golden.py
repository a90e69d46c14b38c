"""Golden rows: tensors that training computed for a few rows, stored with the head.

Flags and layer ids of EAGLE-3 checkpoints are written differently by different tools, and a mistake
costs acceptance without any error. So the training code keeps a few rows, from the target's
features to the logits, with every tensor in between; whatever loads the head computes them again.
The file is in the form of safetensors under another ending: vLLM reads every file that ends in
.safetensors as weights, and refuses tensors that it does not know.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from forerun.atomic_write import atomic_write
from forerun.drafters.eagle3.head import Eagle3Head
from forerun.errors import InvalidModel
from forerun.models.tensor_files import read_tensors, writing_tensors

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
    """Golden rows of a head.

    Attributes:
        tokens: of the text; row t reads token t + 1, so there is one more than rows.
        features: of the target, for all rows but the last `NUM_CHAIN`.
        embedded: of the rows' tokens.
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


def _fingerprints_of(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: fingerprint(tensor) for name, tensor in tensors.items()}


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
    """Compute golden rows and write them into the folder of a head.

    Args:
        head: as it was trained; the rows are computed from its weights in bf16, as they are saved.
        folder: of the saved head.
        tokens: a text, at least `NUM_CHAIN` + 2 tokens.
        features: of the target at these tokens, in the head's order of layers.
        embed: the target's embedding.
    """
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
    marks = json.dumps(_fingerprints_of(rounded.state_dict()))
    with atomic_write(folder / GOLDEN_FILE) as scratch, writing_tensors():
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            scratch,
            metadata={"format": "1", "fingerprints": marks},
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
        fingerprints = json.loads(metadata["fingerprints"])
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
