"""Every parameter alone and in pairs, at every node of random trees, against a naive oracle.

The oracle knows no trees and no counts: it is handed one row of logits and the whole text before
it. Processors are transformers' where it has them, and OpenAI's and vLLM's definitions otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from tests.automaton import Automaton
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from forerun.sampling.config import SamplingParams
from forerun.sampling.history import History, RowHistory
from forerun.sampling.processors import pack_params, target_probs
from forerun.theory.tree import TokenTree

VOCAB = 40
EOS = 0
PROMPT = (3, 9, 9, 17, 5)
OUTPUT = (5, 21, 5, 8)
NUM_NODES = 9
FEW = 12
"""Draft tokens come from so few that paths repeat tokens of prompt, output and themselves."""

Fields = dict[str, Any]
SINGLES: dict[str, Fields] = {
    "temperature": {"temperature": 0.6},
    "greedy": {"temperature": 0.0},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 6},
    "min_p": {"min_p": 0.05},
    "repetition": {"repetition_penalty": 1.7},
    "repetition reversed": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": 0.9},
    "frequency reversed": {"frequency_penalty": -1.1},
    "logit_bias": {"logit_bias": {5: 3.0, 8: -2.5, EOS: 2.0, 30: 1.0}},
    "allowed": {"allowed_token_ids": (EOS, 1, 2, 4, 5, 7, 8, 11, 30, 33)},
    "bad": {"bad_token_ids": (5, 8, 30)},
    # Two more tokens are wanted: the root and its children hold the ends back, no deeper node does.
    "min_tokens": {"min_tokens": 6, "stop_token_ids": (7, 11)},
    "min_tokens, no eos": {"min_tokens": 6, "stop_token_ids": (7,), "ignore_eos": True},
    "mask": {"mask": True},
}
CASES: dict[str, Fields] = SINGLES | {
    f"{one} + {other}": SINGLES[one] | SINGLES[other]
    for one, other in combinations(SINGLES, 2)
    if not SINGLES[one].keys() & SINGLES[other].keys()
}
# Even tokens lead to a state that wants a token below 20 next, odd ones back to the beginning.
AUTOMATON = tuple({token: 1 - token % 2 for token in range(size)} for size in (VOCAB, 20))


class Occurrence(LogitsProcessor):
    """Frequency and presence penalty as OpenAI defines them: over the output."""

    def __init__(self, frequency: float, presence: float) -> None:
        self.frequency = frequency
        self.presence = presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for token, times in Counter(input_ids[0, len(PROMPT) :].tolist()).items():
            scores[0, token] -= self.frequency * times + self.presence
        return scores


def only(tokens: Sequence[int]) -> PrefixConstrainedLogitsProcessor:
    return PrefixConstrainedLogitsProcessor(lambda batch, ids: list(tokens), num_beams=1)


def permitted_after(output: Sequence[int]) -> list[int]:
    state = 0
    for token in output:
        if token not in AUTOMATON[state]:
            return list(range(VOCAB))  # nothing is accepted there, so nothing is masked
        state = AUTOMATON[state][token]
    return list(AUTOMATON[state])


def masks(params: SamplingParams) -> Iterator[LogitsProcessor]:
    if params.allowed_token_ids is not None:
        yield only(params.allowed_token_ids)
    if params.logit_bias is not None:
        yield SequenceBiasLogitsProcessor({(t,): bias for t, bias in params.logit_bias.items()})
    if params.bad_token_ids:
        yield SuppressTokensLogitsProcessor(params.bad_token_ids)
    if params.min_tokens:
        ends = [*params.stop_token_ids, *([] if params.ignore_eos else [EOS])]
        yield MinNewTokensLengthLogitsProcessor(len(PROMPT), params.min_tokens, ends)


def penalties_and_warpers(params: SamplingParams) -> Iterator[LogitsProcessor]:
    if params.repetition_penalty != 1:
        yield RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
    yield Occurrence(params.frequency_penalty, params.presence_penalty)
    if not params.greedy:
        yield TemperatureLogitsWarper(params.temperature)
    if params.min_p:
        yield MinPLogitsWarper(params.min_p)
    if params.top_k:
        yield TopKLogitsWarper(params.top_k)
    if params.top_p < 1:
        yield TopPLogitsWarper(params.top_p)


def oracle(logits: Tensor, text: Sequence[int], fields: Fields) -> Tensor:
    """The distribution after `text`, prompt included."""
    params = params_of(fields)
    grammar = [only(permitted_after(text[len(PROMPT) :]))] if "mask" in fields else []
    chain = LogitsProcessorList([*masks(params), *grammar, *penalties_and_warpers(params)])
    scores = chain(torch.tensor([text]), logits[None].clone())[0]
    if params.greedy:
        return torch.nn.functional.one_hot(scores.argmax(), VOCAB).to(scores)
    return scores.softmax(-1)


def params_of(fields: Fields) -> SamplingParams:
    return SamplingParams(**{name: value for name, value in fields.items() if name != "mask"})


def history_of(fields: Fields) -> History | None:
    params = params_of(fields)
    mask = Automaton(AUTOMATON, VOCAB) if "mask" in fields else None
    if not params.needs_history and mask is None:
        return None
    history = History.of(params, PROMPT, vocab_size=VOCAB, eos_token_ids={EOS}, mask=mask)
    for token in OUTPUT:
        history.append(token)
    return history


def random_tree(generator: torch.Generator) -> tuple[TokenTree, list[int]]:
    """Any topology: siblings, deep paths, tokens repeated along them."""
    draws = torch.randint(0, 1 << 30, (2, NUM_NODES), generator=generator).tolist()
    tree = TokenTree(tuple(draw % (node + 1) - 1 for node, draw in enumerate(draws[0])))
    return tree, [draw % FEW for draw in draws[1]]


def rows_of(history: History | None, tree: TokenTree, tokens: list[int]) -> list[RowHistory | None]:
    return [None] * (NUM_NODES + 1) if history is None else [*history.along(tree, tokens)]


@pytest.mark.parametrize(
    ("seed", "dtype"), [(0, torch.float32), (1, torch.float32), (2, torch.float64)], ids=str
)
def test_every_node_has_the_distribution_of_its_own_text(seed: int, dtype: torch.dtype) -> None:
    """All cases are one batch, each over a tree of its own, so neighbours are tested as well."""
    generator = torch.Generator().manual_seed(seed)
    trees = [random_tree(generator) for _ in CASES]
    num_rows = NUM_NODES + 1
    logits = torch.empty(len(CASES) * num_rows, VOCAB, dtype=dtype)
    logits.normal_(0, 2, generator=generator)
    histories: list[RowHistory | None] = []
    for fields, (tree, tokens) in zip(CASES.values(), trees, strict=True):
        histories += rows_of(history_of(fields), tree, tokens)
    owners = [case for case in range(len(CASES)) for _ in range(num_rows)]
    packed = pack_params([params_of(fields) for fields in CASES.values()], rows=owners)
    found = target_probs(logits, packed, histories).split(num_rows)
    for (name, fields), (tree, tokens), of_case, rows in zip(
        CASES.items(), trees, logits.split(num_rows), found, strict=True
    ):
        for node in range(-1, NUM_NODES):
            text = (*PROMPT, *OUTPUT, *(tokens[above] for above in tree.path(node)))
            expected = oracle(of_case[node + 1], text, fields)
            assert torch.equal(rows[node + 1] > 0, expected > 0), (name, node, text)
            difference = (rows[node + 1] - expected).abs()
            assert bool((difference <= 1e-7 + 1e-5 * expected).all()), (name, node, text)


def test_the_cases_tell_apart_what_they_should() -> None:
    """Each parameter alone changes the distribution of the root already."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.empty(VOCAB).normal_(0, 2, generator=generator)
    rows = {name: oracle(logits, (*PROMPT, *OUTPUT), fields) for name, fields in CASES.items()}
    plain = oracle(logits, (*PROMPT, *OUTPUT), {})
    assert len(CASES) > 100
    for name in SINGLES:
        assert not torch.equal(rows[name], plain), name


@pytest.mark.parametrize("name", ["repetition", "presence", "frequency", "min_tokens", "mask"])
def test_a_history_that_ends_at_the_root_would_show(name: str) -> None:
    """What depends on the path differs at some node from what the committed text alone implies."""
    generator = torch.Generator().manual_seed(1)
    tree, tokens = random_tree(generator)
    history = history_of(SINGLES[name])
    assert history is not None
    logits = torch.empty(NUM_NODES + 1, VOCAB).normal_(0, 2, generator=generator)
    packed = pack_params([params_of(SINGLES[name])], rows=[0] * (NUM_NODES + 1))
    right = target_probs(logits, packed, history.along(tree, tokens))
    wrong = target_probs(logits, packed, [history.at()] * (NUM_NODES + 1))
    assert torch.equal(right[0], wrong[0])
    assert not torch.equal(right, wrong)
