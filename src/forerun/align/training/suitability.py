"""Whether a model can be trained as a draft of a target, tried out before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from forerun.engine.loading import check_vocabularies
from forerun.errors import IncompatibleDraft, InvalidModel
from forerun.models.load import load_tokenizer

__all__ = ["check_tokenizers", "check_trainable"]

PROBE_TOKENS = 8


def check_trainable(model: Any) -> None:
    """Refuse a model whose logits are more than head times decoder, or which mixes packed texts.

    Training reads hidden rows and the head's weights, and lays several texts in one row; whether
    that is the same as the model itself is tried out on a few tokens.

    Raises:
        InvalidModel: it is not.
    """
    name = type(model).__name__
    ids = torch.arange(PROBE_TOKENS)[None] % model.config.vocab_size
    positions = torch.arange(PROBE_TOKENS)[None]
    head = model.get_output_embeddings()
    if head is None:
        raise InvalidModel(f"{name} has no head of its own and cannot be trained as a draft")
    with torch.no_grad():
        expected = model.eval()(input_ids=ids, use_cache=False).logits[0]
        packed = model.get_decoder()(
            input_ids=torch.cat([ids.flip(1), ids], 1),
            position_ids=torch.cat([positions, positions], 1),
            use_cache=False,
        ).last_hidden_state[0, PROBE_TOKENS:]
        found = F.linear(packed, head.weight, head.bias)
    if not torch.allclose(found, expected, rtol=1e-3, atol=1e-3):
        raise InvalidModel(
            f"{name} cannot be trained as a draft: its logits are scaled or capped after the head, "
            "or it does not keep packed texts apart"
        )


def check_tokenizers(target: Path, draft: Path) -> None:
    """Refuse a draft that means other text by its tokens.

    Raises:
        IncompatibleDraft: naming the first tokens that differ.
    """
    try:
        check_vocabularies(load_tokenizer(target), load_tokenizer(draft))
    except IncompatibleDraft as error:
        raise IncompatibleDraft(f"{draft}: {error}, or one made from nothing (init)") from error
