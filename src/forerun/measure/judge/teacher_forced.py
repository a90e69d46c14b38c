"""Acceptance probability of a draft or head at every position of a text by the target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from forerun.drafters.eagle3.checkpoint import read_eagle3_head
from forerun.drafters.eagle3.formats import is_eagle3
from forerun.drafters.eagle3.head import Eagle3Head, over_target_vocabulary
from forerun.drafters.levels import fit_vocabulary
from forerun.models.base import Context, LanguageModel, pack
from forerun.models.checkpoint import read_object
from forerun.models.load import model_folder
from forerun.sampling.config import SamplingParams, draft_params
from forerun.sampling.history import History, RowHistory
from forerun.sampling.processors import pack_params, target_probs
from forerun.theory.tree import TokenTree

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
    """Return the acceptance probability at every token of a response, from chunks of logits."""
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
    """Yield the logits of the rows from `first` to the last but one, chunk by chunk."""
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


def head_in(draft: str | Path, target: LanguageModel) -> Eagle3Head | None:
    """Read the EAGLE-3 head of a folder, in fp32; None if it holds another kind of draft."""
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
    device, dtype = target.device, head.fc.weight.dtype
    following = torch.tensor(ids[1 : len(features) + 1], device=device)
    if head.embed_tokens is not None:
        embedded = head.embed_tokens(following)
    else:
        embedded = target.embed(following).to(dtype)
    positions = torch.arange(len(following), device=device)
    found = head.logits(head(embedded, head.fuse(features.to(dtype)), positions, _attend_causally))
    return over_target_vocabulary(found, head.target_ids.to(device), target.vocab_size)


def _attend_causally(
    queries: Float[Tensor, "rows heads dim"],
    keys: Float[Tensor, "rows kv_heads dim"],
    values: Float[Tensor, "rows kv_heads dim"],
) -> Float[Tensor, "rows heads dim"]:
    attended = F.scaled_dot_product_attention(
        queries.transpose(0, 1),
        keys.transpose(0, 1),
        values.transpose(0, 1),
        is_causal=True,
        enable_gqa=True,
    )
    return attended.transpose(0, 1)


def chunks(rows: Float[Tensor, "rows vocab"]) -> Iterator[Float[Tensor, "chunk vocab"]]:
    yield from torch.split(rows, CHUNK)
