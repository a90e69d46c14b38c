"""What processors must know of a request beyond its parameters: masks, counts of past tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float32
from torch import Tensor

from forerun.sampling.config import SamplingParams

__all__ = ["History", "RowHistory"]


class History:
    """State of one sample of a request, kept by the engine as tokens are committed.

    Needed only where `params.needs_history`; for all other requests use None in its place.

    Attributes:
        num_output: output tokens committed so far.
        bias: allowed tokens, logit bias and bad tokens in one row to add to the logits, or None.
        stop_ids: ids held back until min_tokens are out.
        prompt_mask: tokens of the prompt, where penalties need them.
        output_counts: occurrences of every token in the output, where penalties need them.
    """

    def __init__(
        self,
        *,
        bias: Float32[Tensor, " vocab"] | None,
        stop_ids: tuple[int, ...],
        min_tokens: int,
        prompt_mask: Bool[Tensor, " vocab"] | None,
        output_counts: Float32[Tensor, " vocab"] | None,
    ) -> None:
        self.num_output = 0
        self.bias = bias
        self.stop_ids = stop_ids
        self.min_tokens = min_tokens
        self.prompt_mask = prompt_mask
        self.output_counts = output_counts

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        *,
        vocab_size: int,
        eos_token_ids: Collection[int] = (),
        device: torch.device | str = "cpu",
    ) -> History:
        """The history of a request that has put out nothing yet.

        Args:
            params: of the request; its token ids must lie inside the vocabulary.
            prompt_ids: tokens of the prompt.
            vocab_size: width of the logits.
            eos_token_ids: the model's own; they end the text, so min_tokens holds them back unless
                `ignore_eos` makes them harmless.
            device: where the logits are.
        """
        eos = () if params.ignore_eos else eos_token_ids
        mask = counts = None
        if params.has_penalties:
            mask = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            mask[torch.tensor(prompt_ids, dtype=torch.int64, device=device)] = True
            counts = torch.zeros(vocab_size, device=device)
        return cls(
            bias=_bias_row(params, vocab_size, device),
            stop_ids=tuple(sorted({*eos, *params.stop_token_ids})),
            min_tokens=params.min_tokens,
            prompt_mask=mask,
            output_counts=counts,
        )

    def append(self, token: int) -> None:
        """Count one more output token."""
        self.num_output += 1
        if self.output_counts is not None:
            self.output_counts[token] += 1

    def at(self, path: Sequence[int] = ()) -> RowHistory:
        """History of the row predicting what follows `path`, draft tokens from the root down."""
        return RowHistory(base=self, path=tuple(path))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowHistory:
    """The history one logits row sees: the committed one, extended along its path in the tree."""

    base: History
    path: tuple[int, ...] = ()

    @property
    def held_back(self) -> tuple[int, ...]:
        """Ids that must not come yet because they would end the text before min_tokens."""
        too_short = self.base.num_output + len(self.path) < self.base.min_tokens
        return self.base.stop_ids if too_short else ()


def _bias_row(
    params: SamplingParams, vocab_size: int, device: torch.device | str
) -> Float32[Tensor, " vocab"] | None:
    """Allowed, bias and bad tokens commute once a forbidden token is -inf, so one row holds all."""
    if params.logit_bias is None and params.allowed_token_ids is None and not params.bad_token_ids:
        return None
    row = torch.zeros(vocab_size)
    if params.allowed_token_ids is not None:
        row.fill_(-torch.inf)
        row[list(params.allowed_token_ids)] = 0.0
    for token, value in (params.logit_bias or {}).items():
        row[token] += value
    row[list(params.bad_token_ids)] = -torch.inf
    return row.to(device)
