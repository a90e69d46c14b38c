"""Acceptance probability of an attached head at every position of a text that the target wrote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from forerun.align.data.sample import PackedBatch
from forerun.align.evaluation.teacher_forced import CHUNK, overlaps
from forerun.align.training.unroll import unroll
from forerun.drafters.eagle3.checkpoint import read_eagle3_head
from forerun.drafters.eagle3.formats import is_eagle3
from forerun.drafters.eagle3.head import Eagle3Head
from forerun.models.base import LanguageModel
from forerun.models.checkpoint import read_object
from forerun.models.context import Context, pack
from forerun.models.load import model_folder
from forerun.sampling.config import SamplingParams

__all__ = ["attached_acceptance", "head_in"]


def head_in(draft: str | Path, target: LanguageModel) -> Eagle3Head | None:
    """Read the EAGLE-3 head in a folder, in fp32; None if the folder holds another kind of draft.

    Args:
        draft: folder or name.
        target: that it was trained for.

    Raises:
        InvalidModel: it is damaged.
    """
    folder = model_folder(draft)
    if not is_eagle3(read_object(folder / "config.json")):
        return None
    return read_eagle3_head(folder, num_target_layers=target.num_layers).to(target.device)


@torch.inference_mode()
def attached_acceptance(
    target: LanguageModel,
    head: Eagle3Head,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    params: SamplingParams,
    eos_token_ids: frozenset[int] = frozenset(),
) -> list[float]:
    """Return alpha of the head's first drafted token at every token of a response.

    Row t of the head drafts token t + 2, so a prompt needs two tokens; of a shorter one the first
    token of the response is left out.

    Args:
        target: needs a free slot.
        head: of the target.
        prompt_ids: what the response answers, at least one token.
        response_ids: the target's own text.
        params: of the request.
        eos_token_ids: the model's own.

    Returns:
        One probability per token of the response, as far as the target's context reaches.
    """
    skipped = max(0, 2 - len(prompt_ids))
    prompt, response = [*prompt_ids, *response_ids[:skipped]], response_ids[skipped:]
    ids = [*prompt, *response][: target.max_context]
    response = response[: max(0, len(ids) - len(prompt))]
    if not response:
        return []
    target_logits, features = read_text(target, ids, head.config.feature_layers)
    drafted = head_logits(target, head, ids, features)
    first = len(prompt) - 1
    passes = zip(chunks(target_logits[first:]), chunks(drafted[first - 1 : -1]), strict=True)
    return overlaps(passes, prompt, response, params, target.vocab_size, eos_token_ids)


def read_text(
    target: LanguageModel, ids: Sequence[int], layers: tuple[int, ...]
) -> tuple[Float[Tensor, "rows vocab"], Float[Tensor, "rows layers width"]]:
    """Return the target's logits and features at all tokens of a text except the last."""
    target.store.keep_features(())  # an engine over the same target may have asked for some
    context = Context(target.store, list(ids[:-1]))
    logits, features = [], []
    try:
        for start in range(0, len(ids) - 1, CHUNK):
            size = min(CHUNK, len(ids) - 1 - start)
            tokens = context.pending(size)
            batch = pack([context.span(size)], tokens, range(size), target.device)
            output = target.forward(replace(batch, feature_layers=layers))
            assert output.features is not None  # layers are asked for
            logits.append(output.logits)
            features.append(output.features)
            context.commit(range(size))
    finally:
        context.close()
    return torch.cat(logits), torch.cat(features)


def head_logits(
    target: LanguageModel,
    head: Eagle3Head,
    ids: Sequence[int],
    features: Float[Tensor, "rows layers width"],
) -> Float[Tensor, "rows vocab"]:
    """Return the head's logits over the target's vocabulary at all rows except the last."""
    device = target.device
    tokens = torch.tensor([ids[: len(features) + 1]], device=device)
    batch = PackedBatch(
        ids=tokens,
        positions=torch.arange(tokens.shape[1], device=device)[None],
        samples=torch.zeros_like(tokens),
        predicts=torch.ones_like(tokens, dtype=torch.bool),
    )
    dtype = head.fc.weight.dtype
    padded = torch.cat([features, torch.zeros_like(features[:1])]).to(dtype)

    def embed(wanted: Tensor) -> Tensor:
        if head.embed_tokens is not None:
            own: Tensor = head.embed_tokens(wanted)
            return own
        return target.embed(wanted.flatten()).to(dtype).view(*wanted.shape, -1)

    learning = torch.ones((1, *tokens.shape), dtype=torch.bool, device=device)
    (output,) = unroll(head, embed, batch, padded[None], learning)
    found = head.logits(output[:-1])
    scattered = found.new_full((len(found), target.vocab_size), -torch.inf)
    return scattered.index_copy_(1, head.target_ids.to(device), found)


def chunks(rows: Float[Tensor, "rows vocab"]) -> Iterator[Float[Tensor, "chunk vocab"]]:
    """Yield rows in chunks of bounded size."""
    yield from torch.split(rows, CHUNK)
