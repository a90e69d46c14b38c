"""The target as a teacher runs it: packed rows to hidden states, in transformers' own modules."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from forerun.align.batch import Batch
from forerun.align.data.sample import Sample
from forerun.align.packed import packed_inputs
from forerun.align.teachers.head import Head, head_of
from forerun.errors import InvalidRequest, NotEnoughMemory
from forerun.models.architecture import read_architecture
from forerun.models.checkpoint import read_checkpoint
from forerun.models.huggingface import read_weights
from forerun.models.load import choose_device, choose_dtype, model_folder, read_config
from forerun.models.memory import available_bytes, readable

__all__ = ["TargetModel", "adopt_target", "check_samples", "load_target"]


class TargetModel:
    """Body and head of the target.

    Args:
        body: token ids and positions to hidden states after the final norm; rows of several samples
            are told apart by their positions, which begin at 0 with each.
        head: hidden states to logits.
        model_type: of its configuration.
        max_positions: longest text the target was made for.
        device: where token ids go.
    """

    def __init__(
        self,
        *,
        body: nn.Module,
        head: Head,
        model_type: str,
        max_positions: int,
        device: torch.device,
    ) -> None:
        self.body = body
        self.head = head
        self.model_type = model_type
        self.max_positions = max_positions
        self.device = device

    @torch.no_grad()
    def hidden(self, batch: Batch) -> Float[Tensor, "learned hidden"]:
        """Last hidden states at the learned rows of a batch: what the head makes logits of."""
        on_device = batch.to(self.device)
        outputs = self.body(**packed_inputs(on_device, self.model_type))
        states: Tensor = outputs.last_hidden_state
        return states[on_device.predicts.to(states.device)]


def adopt_target(model: Any) -> TargetModel:
    """A transformers model as a teacher's target: frozen, and in evaluation mode.

    Args:
        model: a causal language model of a supported family, on its device or devices.
    """
    model.eval().requires_grad_(False)
    architecture = read_architecture(type(model).__name__, model.config.to_dict())
    return TargetModel(
        body=model.get_decoder(),
        head=head_of(model),
        model_type=model.config.model_type,
        max_positions=architecture.max_positions,
        device=model.device,
    )


def check_samples(samples: Sequence[Sample], target: TargetModel) -> None:
    """Refuse what the target cannot read.

    Raises:
        InvalidRequest: an id is outside its vocabulary, or a text longer than its context.
    """
    vocab_size, longest = target.head.vocab_size, target.max_positions
    for sample in samples:
        if max(sample.token_ids) >= vocab_size:
            raise InvalidRequest(
                f"a sample holds the token {max(sample.token_ids)}, the target's vocabulary ends "
                f"at {vocab_size - 1}: the text was tokenised for another model"
            )
        if len(sample.token_ids) > longest:
            raise InvalidRequest(
                f"a sample has {len(sample.token_ids)} tokens, the target reads {longest}: lower "
                "the window"
            )


def load_target(source: str | Path, *, dtype: str = "auto", device: str = "auto") -> TargetModel:
    """Load a target for scoring; nothing is generated with it, so it has no KV store.

    Args:
        source: a folder, a name on the Hugging Face hub, or a shipped model such as "zoo:code-11m".
        dtype: "bfloat16", "float16", "float32", or "auto" for the one the weights are stored in.
        device: as for the engine.

    Raises:
        InvalidModel: files are missing, damaged or of an unsupported kind.
        InvalidRequest: there is no such device or dtype.
        NotEnoughMemory: the weights do not fit.
    """
    checkpoint = read_checkpoint(model_folder(source))
    read_config(checkpoint)  # refuses what is not supported before a weight is read
    chosen_dtype, chosen_device = choose_dtype(dtype, checkpoint), choose_device(device)
    needed, available = (
        checkpoint.num_parameters * chosen_dtype.itemsize,
        available_bytes(chosen_device),
    )
    if needed > available:
        raise NotEnoughMemory(
            f"{source} needs {readable(needed)} on {chosen_device}, {readable(available)} are "
            'available; spread it over several GPUs with device "sharded", or take its '
            "log-probabilities from a server (teacher top-k)"
        )
    return adopt_target(read_weights(checkpoint, chosen_dtype).to(chosen_device))
