"""Verifiers with deliberate bugs, each known from real code, which the enumeration must detect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from forerun.drafters.foreign import restricted
from forerun.sampling.chain import Rule, prefix_ratios, residual_weights
from forerun.sampling.config import SamplingParams
from forerun.sampling.history import History, RowHistory, TokenMask
from forerun.sampling.noise import Purpose, step_key
from forerun.sampling.processors import pack_params, target_probs
from forerun.testing.exact.chains import ChainRows, ChainVerifier, engine_accept, engine_final
from forerun.testing.exact.pairs import ModelPairs, Table

Text = tuple[int, ...]
View = Callable[[History, Text], RowHistory]
"""The history of a row, from the committed one and the draft tokens above the row."""

PROMPT = (0, 0, 1)
OFFSET = 1.5
"""Added to log-probabilities, so that logits of both signs meet the repetition penalty."""


class NoRepeats:
    """Token mask that forbids repeating the previous token."""

    def __init__(self, vocab_size: int, last: int | None = None) -> None:
        self.vocab_size = vocab_size
        self.last = last

    def fork(self) -> NoRepeats:
        return NoRepeats(self.vocab_size, self.last)

    def advance(self, token: int) -> None:
        self.last = token

    def allowed(self) -> Bool[Tensor, " vocab"]:
        row = torch.ones(self.vocab_size, dtype=torch.bool)
        if self.last is not None:
            row[self.last] = False
        return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Penalties and masks that change a distribution depending on the text so far.

    Attributes:
        define: logits of one prefix, (pairs, vocab), and the output so far to shaped ones.
        mask: a mask at the beginning of the output, from the size of the vocabulary.
    """

    params: SamplingParams
    define: Callable[[Tensor, Text], Tensor]
    mask: Callable[[int], TokenMask] | None = None


def penalised(params: SamplingParams, logits: Tensor, output: Text) -> Tensor:
    """Apply penalties: repetition over prompt and output, frequency and presence over output."""
    logits = logits.clone()
    times = Counter(output)
    for token in {*PROMPT, *output}:
        column = logits[:, token]
        worse = column * params.repetition_penalty
        logits[:, token] = torch.where(column < 0, worse, column / params.repetition_penalty)
    for token in set(output):
        logits[:, token] -= params.frequency_penalty * times[token] + params.presence_penalty
    return logits


def _without_repeats(logits: Tensor, output: Text) -> Tensor:
    """Set the logit of the last output token to -inf."""
    logits = logits.clone()
    if output:
        logits[:, output[-1]] = -torch.inf
    return logits


# Every number is exact in fp32, as which parameters reach the processors.
PENALTIES = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.75, presence_penalty=0.5)
SHAPES: Mapping[str, Shape] = {
    "penalties": Shape(params=PENALTIES, define=partial(penalised, PENALTIES)),
    "token mask": Shape(params=SamplingParams(), define=_without_repeats, mask=NoRepeats),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShapedPairs(ModelPairs):
    """Pairs whose target rows the engine's processors compute with penalties and masks.

    Attributes:
        seen: by committed tokens and draft tokens above the row, the rows for every prefix.
    """

    seen: Mapping[tuple[int, int], Tensor]

    def target_rows(self, num_committed: int, depth: int) -> Tensor:
        """Return the rows of the engine's processors, `depth` nodes past the committed text."""
        return self.seen[num_committed, depth]


def shaped_pairs(
    pairs: ModelPairs, shape: Shape, max_depth: int, view: View = History.at
) -> ShapedPairs:
    """Apply penalties and masks to the target of every pair; the draft is unchanged."""
    vocab_size = pairs.vocab_size
    logits = [rows.log() + OFFSET for rows in pairs.target]
    texts = [list(product(range(vocab_size), repeat=level)) for level in range(pairs.horizon)]
    target = tuple(
        torch.stack([shape.define(rows[:, i], text) for i, text in enumerate(of_level)], 1)
        for rows, of_level in zip(logits, texts, strict=True)
    )
    return ShapedPairs(
        target=tuple(rows.softmax(-1) for rows in target),
        draft=pairs.draft,
        seen={
            (level - depth, depth): _seen_rows(logits[level], texts[level], depth, shape, view)
            for level in range(pairs.horizon)
            for depth in range(min(level, max_depth) + 1)
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForeignPairs(ModelPairs):
    """Pairs whose drafts have another vocabulary, drafting the tokens that both have.

    Attributes:
        verified: the draft's rows that verification reads, per level.
    """

    verified: Table

    def draft_rows(self, num_committed: int, depth: int) -> Tensor:
        """Return the draft's rows as verification reads them."""
        return self.verified[num_committed + depth]


FlawedMap = Literal["none", "not renormalised", "two draft tokens for one"]


def foreign_pairs(
    pairs: ModelPairs, generator: torch.Generator, flaw: FlawedMap = "none"
) -> ForeignPairs:
    """Give every draft two more tokens than the target has, and a random map between the two."""
    vocab_size = pairs.vocab_size
    order = torch.empty(vocab_size + 2).uniform_(generator=generator).argsort()
    columns, num_shared = order[:vocab_size], 1 + int(order[0]) % vocab_size
    is_missing = torch.arange(vocab_size) >= num_shared
    drawn, verified = [], []
    for rows in pairs.draft:
        logits = torch.empty(*rows.shape[:-1], vocab_size + 2, dtype=rows.dtype)
        logits.uniform_(-3, 0, generator=generator)[..., columns] = rows.clamp(min=1e-9).log()
        probs, own = logits.softmax(-1), restricted(logits, columns, is_missing).softmax(-1)
        drawn.append(own)
        if flaw == "not renormalised":
            verified.append(probs[..., columns] * ~is_missing)
        elif flaw == "two draft tokens for one":
            both = probs[..., columns] * ~is_missing
            both[..., 0] += probs[..., order[-1]]
            drawn[-1] = both / both.sum(-1, keepdim=True)
            verified.append(own)
        else:
            verified.append(own)
    return ForeignPairs(target=pairs.target, draft=tuple(drawn), verified=tuple(verified))


def _seen_rows(logits: Tensor, texts: list[Text], depth: int, shape: Shape, view: View) -> Tensor:
    """Return the engine's rows after `texts`, whose last `depth` tokens are drafted."""
    num_pairs, num_texts, vocab_size = logits.shape
    bases: dict[Text, History] = {}
    histories: list[RowHistory | None] = []
    for text in texts:
        committed, path = text[: len(text) - depth], text[len(text) - depth :]
        if committed not in bases:
            bases[committed] = _history_after(committed, shape, vocab_size)
        histories += [view(bases[committed], path)] * num_pairs
    rows = logits.transpose(0, 1).flatten(0, 1)
    packed = pack_params([shape.params], rows=[0] * len(rows))
    found = target_probs(rows, packed, histories)
    return found.view(num_texts, num_pairs, vocab_size).transpose(0, 1)


def _history_after(committed: Text, shape: Shape, vocab_size: int) -> History:
    mask = None if shape.mask is None else shape.mask(vocab_size)
    history = History.of(shape.params, PROMPT, vocab_size=vocab_size, mask=mask)
    for token in committed:
        history.append(token)
    return history


def _uncapped_accept(rows: ChainRows, rule: Rule) -> Tensor:
    """Bug: accept a block by the plain product of ratios instead of the capped product."""
    accept = engine_accept(rows, rule)
    nodes = rows.tokens[..., None]
    drawn = rows.draft[:, :-1].gather(-1, nodes).clamp(min=1e-50)  # drawn, hence positive
    product = (rows.target[:, :-1].gather(-1, nodes) / drawn)[..., 0].prod(-1)
    return torch.cat([accept[:, :-1], product.clamp(max=1)[:, None]], -1)


def _final_from_next_row(rows: ChainRows, accepted: Tensor, rule: Rule) -> Tensor:
    """Bug: take the residual from the row after the rejected token's row."""
    right = engine_final(rows, accepted, rule)
    chains = torch.arange(len(accepted))
    row = (accepted + 1).clamp(max=rows.target.shape[1] - 1)
    ratios = prefix_ratios(rows.target, rows.draft[:, :-1], rows.tokens, rows.num_drafted)
    ratio = ratios[chains, accepted] if rule == "block" else torch.ones_like(ratios[:, 0])
    wrong = residual_weights(rows.target[chains, row], rows.draft[chains, row], ratio)
    return torch.where((accepted < rows.num_drafted)[:, None], wrong, right)


def _bonus_from_draft(rows: ChainRows, accepted: Tensor, rule: Rule) -> Tensor:
    right = engine_final(rows, accepted, rule)
    draft_row = rows.draft[torch.arange(len(accepted)), accepted]
    return torch.where((accepted == rows.num_drafted)[:, None], draft_row, right)


def _position_draft_key(request_key: int, num_committed: int, node: int) -> int:
    return step_key(request_key, num_committed + node, 0, Purpose.DRAFT)


def _accept_draft_key(request_key: int, num_committed: int, node: int) -> int:
    return step_key(request_key, num_committed, node, Purpose.ACCEPT)


def _position_verify_keys(request_key: int, num_committed: int, num_nodes: int) -> list[int]:
    accept = [step_key(request_key, num_committed + i, 0, Purpose.ACCEPT) for i in range(num_nodes)]
    last = [step_key(request_key, num_committed, 0, p) for p in (Purpose.RECOVERED, Purpose.BONUS)]
    return accept + last


def _confident_after(draft_row: Tensor, drawn_prob: Tensor) -> Tensor:
    return drawn_prob >= 0.25


def _committed_only(history: History, path: tuple[int, ...]) -> RowHistory:
    return history.at()


def _masked_root_only(history: History, path: tuple[int, ...]) -> RowHistory:
    return RowHistory(base=history, path=path) if path else history.at()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedView:
    """History of a row with a deliberate bug, as the processors read it.

    Attributes:
        shape: of the distributions that depend on it, see `shaped.SHAPES`.
        view: the flawed history of a row.
    """

    name: str
    shape: str
    view: View


def planted(
    name: str, *, rules: tuple[Rule, ...] = ("token", "block"), **replaced: Any
) -> tuple[str, tuple[ChainVerifier, ...]]:
    return name, tuple(ChainVerifier(rule=rule, **replaced) for rule in rules)


PLANTED = (
    planted("uncapped product", rules=("block",), accept=_uncapped_accept),
    planted("residual from the wrong row", final=_final_from_next_row),
    planted("bonus from the draft", final=_bonus_from_draft),
    planted("position-only draft noise", rules=("block",), draft_key=_position_draft_key),
    planted("position-only accept noise", rules=("block",), verify_keys=_position_verify_keys),
    planted("one noise for draft and acceptance", draft_key=_accept_draft_key),
    planted("drawn token dropped by its own probability", keep=_confident_after),
)

PLANTED_VIEWS = (
    PlantedView(
        name="penalty counts not extended along the path", shape="penalties", view=_committed_only
    ),
    PlantedView(name="mask not applied at draft nodes", shape="token mask", view=_masked_root_only),
)
