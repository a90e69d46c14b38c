"""Drafting with Medusa heads, which read the target's last hidden state.

A step costs one product per head and one pass of the output matrix over as many rows, whatever the
shape. Heads know nothing of each other's tokens: their distributions are marginals. What the
reference calls typical acceptance changes the distribution and is not done here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from forerun.drafters.base import DraftRequest, StepOutcome, check_made_for
from forerun.drafters.marginals import MarginalDrafter
from forerun.errors import InvalidModel
from forerun.models.base import LanguageModel
from forerun.models.checkpoint import read_object
from forerun.models.stored_tensors import check_tensors, read_tensors, write_files


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """Sizes of Medusa heads on a frozen target.

    Attributes:
        num_heads: tokens that can be drafted; head k, from 0, predicts the token k + 2 after the
            row it reads.
        own_heads: every head has an output matrix of its own; otherwise all use the target's.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_blocks: int = 1
    own_heads: bool = False

    def __post_init__(self) -> None:
        if min(self.hidden_size, self.vocab_size, self.num_heads, self.num_blocks) < 1:
            raise InvalidModel(f"Medusa heads need positive sizes, not {self}")


SharedHead = Callable[[Float[Tensor, "rows width"]], Float[Tensor, "rows vocab"]]
"""The target's own output head, such as `LanguageModel.head`."""


class ResidualBlock(nn.Module):
    """h + SiLU(W h + b), where W starts at zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + F.silu(self.linear(hidden))


class MedusaHeads(nn.Module):
    """All Medusa heads; the state dict has the names of the reference code without their prefix.

    `{head}.{block}.linear.weight`, `{head}.{block}.linear.bias` and, where heads have output
    matrices of their own, `{head}.{num_blocks}.weight`.
    """

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        self.heads: list[nn.Sequential] = []
        for index in range(config.num_heads):
            parts: list[nn.Module] = [
                ResidualBlock(config.hidden_size) for _ in range(config.num_blocks)
            ]
            if config.own_heads:
                parts.append(nn.Linear(config.hidden_size, config.vocab_size, bias=False))
            self.heads.append(nn.Sequential(*parts))
            self.add_module(str(index), self.heads[-1])

    def states(
        self, hidden: Float[Tensor, "rows width"], num_heads: int | None = None
    ) -> list[Float[Tensor, "rows width"]]:
        """Return the input of every head's output matrix."""
        return [head[: self.config.num_blocks](hidden) for head in self.heads[:num_heads]]

    def forward(
        self,
        hidden: Float[Tensor, "rows width"],
        shared: SharedHead | None = None,
        num_heads: int | None = None,
    ) -> Float[Tensor, "heads rows vocab"]:
        states = self.states(hidden, num_heads)
        if not self.config.own_heads:
            assert shared is not None
            return shared(torch.cat(states)).view(len(states), len(hidden), -1)
        return torch.stack(
            [head[-1](state) for head, state in zip(self.heads, states, strict=False)]
        )


WEIGHTS = "medusa_lm_head.safetensors"
VLLM_WEIGHTS = "model.safetensors"
VLLM_NOTE = (
    "vLLM reads these heads as a top-1 chain, and their biases only because config.json has "
    "medusa_fc_bias: a checkpoint in the reference's form loses its biases there without notice"
)
VLLM_LINEAR = re.compile(r"blocks\.(\d{1,9})\.layers\.(\d{1,9})\.(weight|bias)")
VLLM_HEAD = re.compile(r"lm_heads\.(\d{1,9})\.weight")
LINEAR = re.compile(r"(\d{1,9})\.(\d{1,9})\.linear\.(weight|bias)")


def read_medusa(folder: Path, *, vocab_size: int) -> MedusaHeads:
    """Read Medusa heads in either form, in fp32."""
    settings = read_object(folder / "config.json")
    tensors = _read_heads(folder)
    linear = {match for name in tensors if (match := LINEAR.fullmatch(name))}
    if not linear:
        raise InvalidModel(
            f"the Medusa heads in {folder} have no residual block (0.0.linear.weight)"
        )
    num_heads = 1 + max(int(match[1]) for match in linear)
    num_blocks = 1 + max(int(match[2]) for match in linear)
    if num_heads * num_blocks > len(linear):
        raise InvalidModel(
            f"the tensors in {folder} are numbered as of {num_heads} Medusa heads of {num_blocks} "
            f"blocks, but only {len(linear)} are there: fetch the heads again"
        )
    declared = settings.get("medusa_num_heads", settings.get("num_heads", num_heads))
    if declared != num_heads:
        raise InvalidModel(
            f"config.json in {folder} declares {declared!r:.40} Medusa heads, the weights hold "
            f"{num_heads}"
        )
    own = tensors.get(f"0.{num_blocks}.weight")
    first = tensors[min(match[0] for match in linear)]
    if first.dim() == 0 or (own is not None and own.dim() != 2):
        raise InvalidModel(f"the tensors in {folder} are no matrices: fetch the heads again")
    config = MedusaConfig(
        hidden_size=len(first),
        vocab_size=vocab_size if own is None else len(own),
        num_heads=num_heads,
        num_blocks=num_blocks,
        own_heads=own is not None,
    )
    heads = MedusaHeads(config)
    check_tensors(heads.state_dict(), tensors, str(folder), advice="fetch the heads again")
    heads.load_state_dict(tensors)
    return heads.eval()


def _read_heads(folder: Path) -> dict[str, Tensor]:
    """Read the tensors of Medusa heads under the names of the reference code."""
    path = next((p for n in (WEIGHTS, VLLM_WEIGHTS) if (p := folder / n).is_file()), None)
    if path is None:
        raise InvalidModel(
            f"{folder} has neither {WEIGHTS} nor {VLLM_WEIGHTS}; pickled heads "
            "(medusa_lm_head.pt) can run code when loaded: convert them to safetensors"
        )
    stored = read_tensors(path)
    stored = {name.removeprefix("medusa_head."): tensor for name, tensor in stored.items()}
    if path.name == WEIGHTS:
        return stored
    stored.pop("lm_head.weight", None)  # the target's own output matrix
    blocks = {int(match[2]) for name in stored if (match := VLLM_LINEAR.fullmatch(name))}
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if match := VLLM_LINEAR.fullmatch(name):
            tensors[f"{match[1]}.{match[2]}.linear.{match[3]}"] = tensor
        elif match := VLLM_HEAD.fullmatch(name):
            tensors[f"{match[1]}.{len(blocks)}.weight"] = tensor
        else:
            tensors[name] = tensor
    return tensors


def write_medusa(heads: MedusaHeads, folder: Path, *, target: str) -> None:
    """Write heads in their own dtype and in the form of the reference code."""
    settings = {
        "medusa_num_heads": heads.config.num_heads,
        "medusa_num_layers": heads.config.num_blocks,
        "base_model_name_or_path": target,
        "torch_dtype": str(next(heads.parameters()).dtype).removeprefix("torch."),
    }
    write_files(folder, settings, WEIGHTS, heads.state_dict())


def write_medusa_vllm(
    heads: MedusaHeads, folder: Path, *, output: Tensor | None, max_positions: int
) -> None:
    """Write heads in their own dtype and in the form that vLLM reads; see `VLLM_NOTE`."""
    config = heads.config
    if (output is None) != config.own_heads:
        raise ValueError("the target's output matrix is written for heads without their own")
    tensors = {}
    for name, tensor in heads.state_dict().items():
        if match := LINEAR.fullmatch(name):
            tensors[f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"] = tensor
        else:
            tensors[f"lm_heads.{name.partition('.')[0]}.weight"] = tensor
    if output is not None:
        tensors["lm_head.weight"] = output
    settings = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_blocks,
        "max_seq_len": max_positions,
        "max_position_embeddings": max_positions,
        "medusa_fc_bias": True,
        "original_lm_head": not config.own_heads,
        "torch_dtype": str(next(heads.parameters()).dtype).removeprefix("torch."),
    }
    write_files(folder, settings, VLLM_WEIGHTS, tensors)


class MedusaDrafter(MarginalDrafter):
    """Drafts chains and trees with Medusa heads."""

    method = "medusa"

    def __init__(self, heads: MedusaHeads, target: LanguageModel) -> None:
        self.heads = heads
        self.target = target
        self.required_features = (target.num_layers,)
        self.num_positions = heads.config.num_heads
        self._last: dict[str, Float[Tensor, " width"]] = {}

    def is_ready(self, request: DraftRequest) -> bool:
        return request.request_id in self._last

    def predict(
        self, requests: Sequence[DraftRequest], num_positions: int
    ) -> Float[Tensor, "positions requests vocab"]:
        hidden = torch.stack([self._last[request.request_id] for request in requests])
        logits: Tensor = self.heads(self.target.final_norm(hidden), self.target.head, num_positions)
        return logits

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Store the target's hidden state at the last committed row of every request."""
        for outcome in outcomes:
            if outcome.features is None:
                self.warn_of_missing(outcome)
            elif len(outcome.features):
                self._last[outcome.request_id] = outcome.features[-1, 0].clone()

    def forget(self, request_id: str) -> None:
        self._last.pop(request_id, None)


def load_medusa(folder: Path, target: LanguageModel) -> MedusaDrafter:
    """Load the Medusa heads in a folder for a loaded target."""
    heads = read_medusa(folder, vocab_size=target.vocab_size)
    sizes = (heads.config.hidden_size, heads.config.vocab_size)
    check_made_for(f"the Medusa heads in {folder} were", sizes, target)
    dtype = target.dtype
    # A target without norm or matrix is refused before any request.
    hidden = torch.zeros((1, target.hidden_size), dtype=dtype, device=target.device)
    target.head(target.final_norm(hidden))
    return MedusaDrafter(heads.to(device=target.device, dtype=dtype).requires_grad_(False), target)
