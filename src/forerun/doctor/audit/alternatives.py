"""Distributions of a token at a drafted position on servers that have one of the named faults.

Each function returns distributions, one row per token. The audit compares the likelihood of the
text under them, mixed with the reference's own rows, to name a fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from jaxtyping import Float
from numpy import ndarray

Rows = Float[ndarray, "n vocab"]

FAMILIES: Mapping[str, str] = {
    "draft_kept": "acceptance",
    "half_compared": "acceptance",
    "cooler_acceptance": "acceptance",
    "cooler_record": "acceptance",
    "warmer_acceptance": "acceptance",
    "warmer_record": "acceptance",
    "typical": "typical_acceptance",
    "recovered_from_target": "residual",
    "recovered_absolute": "residual",
    "recovered_argmax": "argmax_slot",
    "argmax": "argmax_slot",
    "noise_reused": "reused_noise",
    "draft_unfiltered": "one_sided_filter",
    "unfiltered": "one_sided_filter",
    "unpenalised": "missing_penalties",
    "unbiased": "missing_penalties",
    "row_before": "wrong_row",
    "flatter": "stale_state",
    "sharper": "acceptance",
}
"""The family of every alternative."""


def of_target(target: Rows, further: Mapping[str, Rows]) -> Iterator[tuple[str, Rows]]:
    """Yield the distributions under faults for which the draft need not be known.

    `further` has rows under other parameters or at other places, by the name of the alternative.
    """
    yield from further.items()
    yield "argmax", _one_hot(target)
    yield "flatter", _tempered(target, 2.0)
    yield "sharper", _tempered(target, 0.7)


def of_draft(
    target: Rows, draft: Rows, unprocessed: Rows | None = None
) -> Iterator[tuple[str, Rows]]:
    """Yield the distributions under faults that depend on the draft's distribution."""
    if unprocessed is not None:  # the draft is filtered, and the target is not
        accepted = _ratio(unprocessed, draft)
        yield "draft_unfiltered", _verified(unprocessed, draft, accepted, draft)
    kept = np.minimum(target, draft)
    rejected = 1.0 - kept.sum(-1, keepdims=True)
    residual = _normalised(np.maximum(target - draft, 0.0), target)
    yield "draft_kept", draft
    yield "half_compared", _verified(target, draft, _ratio(2.0 * target, draft), draft)
    for name, temperature in (("cooler", 0.5), ("warmer", 2.0)):
        recorded = _tempered(draft, temperature)
        accepted = _ratio(target, recorded)
        yield f"{name}_acceptance", _verified(target, draft, accepted, draft)
        yield f"{name}_record", _verified(target, draft, accepted, recorded)
    yield "recovered_from_target", kept + rejected * target
    yield "recovered_absolute", kept + rejected * _normalised(np.abs(target - draft), target)
    yield "recovered_argmax", kept + rejected * _one_hot(residual)
    entropy = -(target * np.log(np.maximum(target, 1e-30))).sum(-1, keepdims=True)
    threshold = np.minimum(0.09, 0.3 * np.exp(-entropy))
    yield "typical", _verified(target, draft, (target > threshold) * 1.0, draft)
    yield "noise_reused", _with_noise_of_draft(target, draft, residual)


def _verified(target: Rows, draft: Rows, accepted: Rows, recorded: Rows) -> Rows:
    """Draw from the draft, accept with these probabilities, recover from the residual."""
    kept = draft * np.minimum(accepted, 1.0)
    rest = 1.0 - kept.sum(-1, keepdims=True)
    found: Rows = kept + rest * _normalised(np.maximum(target - recorded, 0.0), target)
    return found


def _with_noise_of_draft(target: Rows, draft: Rows, residual: Rows) -> Rows:
    """Accept a token with the same random number that it was drawn with by inverse transform."""
    ends = draft.cumsum(-1)
    starts = ends - draft
    kept = np.maximum(np.minimum(ends, _ratio(target, draft)) - starts, 0.0)
    found: Rows = kept + (1.0 - kept.sum(-1, keepdims=True)) * residual
    return found


def _ratio(above: Rows, below: Rows) -> Rows:
    found: Rows = np.minimum(above / np.maximum(below, 1e-30), 1.0)
    return found


def _tempered(rows: Rows, temperature: float) -> Rows:
    raised = np.power(rows, 1.0 / temperature)
    found: Rows = raised / raised.sum(-1, keepdims=True)
    return found


def _one_hot(rows: Rows) -> Rows:
    found = np.zeros_like(rows)
    found[np.arange(len(rows)), rows.argmax(-1)] = 1.0
    return found


def _normalised(rows: Rows, otherwise: Rows) -> Rows:
    """Divide by the sums; rows without mass become those of `otherwise`."""
    sums = rows.sum(-1, keepdims=True)
    found: Rows = np.where(sums > 1e-12, rows / np.maximum(sums, 1e-12), otherwise)
    return found
