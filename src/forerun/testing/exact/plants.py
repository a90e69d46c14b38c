"""Bugs planted in the verifiers, each found in real code; the enumeration must catch them all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.sampling.chain import Rule, prefix_ratios, residual_weights
from forerun.sampling.history import History, RowHistory
from forerun.sampling.noise import Purpose, step_key
from forerun.testing.exact.shaped import View
from forerun.testing.exact.verifiers import ChainRows, ChainVerifier, engine_accept, engine_final

__all__ = ["PLANTED", "PLANTED_VIEWS", "PlantedView"]


def uncapped_accept(rows: ChainRows, rule: Rule) -> Tensor:
    """Accept the whole block by the plain product of ratios, not by the capped one."""
    accept = engine_accept(rows, rule)
    nodes = rows.tokens[..., None]
    drawn = rows.draft[:, :-1].gather(-1, nodes).clamp(min=1e-50)  # drawn, hence positive
    product = (rows.target[:, :-1].gather(-1, nodes) / drawn)[..., 0].prod(-1)
    return torch.cat([accept[:, :-1], product.clamp(max=1)[:, None]], -1)


def final_from_next_row(rows: ChainRows, accepted: Tensor, rule: Rule) -> Tensor:
    """Take the residual one row too far down the chain."""
    right = engine_final(rows, accepted, rule)
    chains = torch.arange(len(accepted))
    row = (accepted + 1).clamp(max=rows.target.shape[1] - 1)
    ratios = prefix_ratios(rows.target, rows.draft[:, :-1], rows.tokens, rows.num_drafted)
    ratio = ratios[chains, accepted] if rule == "block" else torch.ones_like(ratios[:, 0])
    wrong = residual_weights(rows.target[chains, row], rows.draft[chains, row], ratio)
    return torch.where((accepted < rows.num_drafted)[:, None], wrong, right)


def bonus_from_draft(rows: ChainRows, accepted: Tensor, rule: Rule) -> Tensor:
    """Draw the bonus token from the draft's distribution."""
    right = engine_final(rows, accepted, rule)
    draft_row = rows.draft[torch.arange(len(accepted)), accepted]
    return torch.where((accepted == rows.num_drafted)[:, None], draft_row, right)


def position_draft_key(request_key: int, num_committed: int, node: int) -> int:
    """Key a draft draw by the position of its token alone."""
    return step_key(request_key, num_committed + node, 0, Purpose.DRAFT)


def accept_draft_key(request_key: int, num_committed: int, node: int) -> int:
    """Draw a draft token with the noise of its own acceptance test."""
    return step_key(request_key, num_committed, node, Purpose.ACCEPT)


def position_verify_keys(request_key: int, num_committed: int, num_nodes: int) -> list[int]:
    """Key acceptance tests by position alone."""
    accept = [step_key(request_key, num_committed + i, 0, Purpose.ACCEPT) for i in range(num_nodes)]
    last = [step_key(request_key, num_committed, 0, p) for p in (Purpose.RECOVERED, Purpose.BONUS)]
    return accept + last


def confident_after(draft_row: Tensor, drawn_prob: Tensor) -> Tensor:
    """Drop a drawn token, and what follows it, because the draft gave it a low probability."""
    return drawn_prob >= 0.25


def committed_only(history: History, path: tuple[int, ...]) -> RowHistory:
    """Give a draft node the counts of the committed text, not extended along its path."""
    return history.at()


def masked_root_only(history: History, path: tuple[int, ...]) -> RowHistory:
    """Mask the row of the last committed token and no draft node."""
    return RowHistory(base=history, path=path) if path else history.at()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedView:
    """A row history with a planted bug, which the processors read.

    Attributes:
        name: of the bug.
        shape: of the distributions that depend on it, see `shaped.SHAPES`.
        view: the flawed history of a row.
    """

    name: str
    shape: str
    view: View


def planted(
    name: str, *, rules: tuple[Rule, ...] = ("token", "block"), **replaced: Any
) -> tuple[str, tuple[ChainVerifier, ...]]:
    """Return a bug by name, planted in the verifiers of `rules`."""
    return name, tuple(ChainVerifier(rule=rule, **replaced) for rule in rules)


PLANTED = (
    planted("uncapped product", rules=("block",), accept=uncapped_accept),
    planted("residual from the wrong row", final=final_from_next_row),
    planted("bonus from the draft", final=bonus_from_draft),
    planted("position-only draft noise", rules=("block",), draft_key=position_draft_key),
    planted("position-only accept noise", rules=("block",), verify_keys=position_verify_keys),
    planted("one noise for draft and acceptance", draft_key=accept_draft_key),
    planted("drawn token dropped by its own probability", keep=confident_after),
)

PLANTED_VIEWS = (
    PlantedView(
        name="penalty counts not extended along the path", shape="penalties", view=committed_only
    ),
    PlantedView(name="mask not applied at draft nodes", shape="token mask", view=masked_root_only),
)
