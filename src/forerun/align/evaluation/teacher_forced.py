"""Acceptance probability at every position of a text that the target wrote."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from forerun.drafters.levels import fit_vocabulary
from forerun.models.base import LanguageModel
from forerun.models.context import Context, pack
from forerun.sampling.config import SamplingParams, draft_params
from forerun.sampling.history import History, RowHistory
from forerun.sampling.processors import pack_params, target_probs
from forerun.theory.tree import TokenTree

__all__ = [
    "CHUNK",
    "acceptance_probabilities",
    "histories_before",
    "logits_of",
    "num_known",
    "overlap",
    "overlaps",
    "probs_of_rows",
]

CHUNK = 256
"""Rows of one pass; those of a chunk are the largest tensors here."""


@torch.inference_mode()
def acceptance_probabilities(
    target: LanguageModel,
    draft: LanguageModel,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    params: SamplingParams,
    eos_token_ids: frozenset[int] = frozenset(),
) -> list[float]:
    """Return the acceptance probability at every token of the target's response.

    A greedy distribution has all its mass on one token, so a greedy draft is judged by the target's
    probability of that token, and under greedy parameters by whether the two agree.

    Args:
        target: needs a free slot, as the draft does.
        draft: of the same token ids.
        prompt_ids: what the response answers, at least one token.
        response_ids: the target's own text.
        params: of the request; the draft's own temperature holds for the draft.
        eos_token_ids: the model's own.

    Returns:
        One probability per token of the response, as far as both contexts reach and the draft
        has the ids.
    """
    ids = [*prompt_ids, *response_ids]
    # The last token need not be read.
    reach = min(target.max_context, draft.max_context, num_known(draft, ids) + 1)
    ids, response = ids[:reach], response_ids[: max(0, reach - len(prompt_ids))]
    if not response:
        return []
    first = len(prompt_ids) - 1
    passes = zip(logits_of(target, ids, first), logits_of(draft, ids, first), strict=True)
    return overlaps(passes, prompt_ids, response, params, target.vocab_size, eos_token_ids)


def overlaps(
    passes: Iterable[tuple[Float[Tensor, "rows vocab"], Float[Tensor, "rows draft_vocab"]]],
    prompt_ids: Sequence[int],
    response: Sequence[int],
    params: SamplingParams,
    vocab_size: int,
    eos_token_ids: frozenset[int] = frozenset(),
) -> list[float]:
    """Return the acceptance probability at every token of a response, from chunks of logits.

    Args:
        passes: logits of target and draft at the same tokens, in chunks.
        prompt_ids: what the response answers.
        response: one token per row.
        params: of the request; the draft's own temperature holds for the draft.
        vocab_size: of the target.
        eos_token_ids: the model's own.
    """
    history = None
    if params.needs_history:
        history = History.of(params, prompt_ids, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    alphas: list[float] = []
    for target_logits, draft_logits in passes:
        chunk = response[len(alphas) : len(alphas) + len(target_logits)]
        histories = [] if history is None else histories_before(history, chunk)
        target_rows = probs_of_rows(target_logits, params, histories)
        shared = fit_vocabulary(draft_logits.to(target_rows.device), vocab_size)
        draft_rows = probs_of_rows(shared, draft_params(params), histories)
        alphas += overlap(target_rows, draft_rows).tolist()
        if history is not None:
            for token in chunk:
                history.append(token)
    return alphas


def logits_of(
    model: LanguageModel, ids: Sequence[int], first: int, chunk: int | None = None
) -> Iterator[Float[Tensor, "rows vocab"]]:
    """Yield the logits of the rows from `first` to the last but one, chunk by chunk.

    Args:
        model: with a free slot.
        ids: known to the model.
        first: row.
        chunk: rows of one pass, by default `CHUNK`.
    """
    fed, chunk = list(ids[:-1]), chunk or CHUNK
    context = Context(model.store, fed)
    try:
        for start in range(0, len(fed), chunk):
            size = min(chunk, len(fed) - start)
            wanted = range(max(first - start, 0), size)
            batch = pack([context.span(size)], context.pending(size), wanted, model.device)
            logits = model.forward(batch).logits
            context.commit(range(size))
            if wanted:
                yield logits
    finally:
        context.close()


def num_known(model: LanguageModel, ids: Sequence[int]) -> int:
    """Return the number of ids before the first one outside the model's vocabulary."""
    return next((i for i, token in enumerate(ids) if token >= model.vocab_size), len(ids))


def overlap(one: Float[Tensor, "*rows vocab"], other: Float[Tensor, "*rows vocab"]) -> Tensor:
    """Return the sum of min(one, other): the acceptance probability of two distributions.

    The result is 0 where one is NaN: a draft whose probabilities are NaN drafts nothing.
    """
    return torch.minimum(one, other).sum(-1).nan_to_num(0.0)


def histories_before(history: History, tokens: Sequence[int]) -> list[RowHistory]:
    """Return the state of the logits processors before each of the tokens, in order."""
    return history.along(TokenTree.chain(len(tokens) - 1), tokens[:-1])


def probs_of_rows(
    logits: Float[Tensor, "rows vocab"], params: SamplingParams, histories: Sequence[RowHistory]
) -> Float[Tensor, "rows vocab"]:
    """Return the distribution of every row under the same sampling parameters."""
    rows = pack_params([params], logits.device, [0] * len(logits))
    return target_probs(logits, rows, histories)
