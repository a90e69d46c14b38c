"""Stop strings wherever they fall: across tokens, blocks, recovered tokens, and inside characters.

The target says the same bytes over and over, one per token. A drafter that errs at one place
decides what is accepted and recovered, and where blocks end. The oracle reads token by token.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests import tiny
from tests.tabular import TabularModel

from forerun.control.base import Plan
from forerun.drafters.base import Drafter, DraftRequest, StepOutcome
from forerun.engine.engine import Engine
from forerun.engine.results import Completion
from forerun.sampling.config import SamplingParams
from forerun.sampling.proposal import Choice, Proposal, TokenSource
from forerun.theory.tree import TokenTree

pytestmark = pytest.mark.usefixtures("unchecked")

SAID = "xö😀yz-ab"
BYTES = SAID.encode()
NUM_TOKENS = 2 * len(BYTES) + 3
WRONG = ord("!")


def token_of(byte: int) -> int:
    return next(t for t in range(1, 300) if tiny.tokenizer().token_bytes(t) == bytes([byte]))


IDS = [token_of(byte) for byte in BYTES]
PROMPT = [IDS[-1]]


class ErrsAt(Drafter):
    """Drafts what will be said, except for one token of every round."""

    method = "errs"
    required_features: tuple[int, ...] = ()

    def __init__(self, place: int) -> None:
        self.place = place

    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | None]:
        return [
            self.chain(len(request.ids) - request.num_prompt, plan.num_speculative_tokens)
            for request, plan in zip(requests, plans, strict=True)
        ]

    def chain(self, num_said: int, length: int) -> Proposal:
        places = [place % len(IDS) for place in range(num_said, num_said + length)]
        tokens = [token_of(WRONG) if place == self.place else IDS[place] for place in places]
        return Proposal(
            tokens=torch.tensor(tokens),
            tree=TokenTree.chain(length),
            choice=Choice.DETERMINISTIC,
        )

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Nothing is kept."""

    def forget(self, request_id: str) -> None:
        """Nothing is kept."""


@pytest.fixture(scope="module")
def target() -> TabularModel:
    law = torch.full((tiny.VOCAB_SIZE + 1, tiny.VOCAB_SIZE), -torch.inf, dtype=torch.float64)
    law[:, IDS[0]] = 0.0
    for token, following in zip(IDS, [*IDS[1:], IDS[0]], strict=True):
        law[token] = -torch.inf
        law[token, following] = 0.0
    store = tiny.tabular(0, vocab_size=tiny.VOCAB_SIZE, order=1).store
    return TabularModel(log_probs=law, order=1, store=store)


def text_after(num_tokens: int) -> str:
    """Whole characters only."""
    said = (BYTES * 3)[:num_tokens]
    return said.decode(errors="ignore")


def expected(params: SamplingParams) -> tuple[int, str, str | None]:
    """Tokens needed, the text, and the stop that ended it."""
    for num_tokens in range(1, NUM_TOKENS + 1):
        text, before = text_after(num_tokens), len(text_after(num_tokens - 1))
        ends = [
            (end - len(stop), -len(stop), stop)
            for stop in params.stop
            for end in range(before + 1, len(text) + 1)
            if text[:end].endswith(stop)
        ]
        if ends and num_tokens > params.min_tokens:
            begin, _, stop = min(ends)
            kept = len(stop) if params.include_stop_str_in_output else 0
            return num_tokens, text[: begin + kept], stop
    whole = (BYTES * 3)[:NUM_TOKENS].decode(errors="replace")
    return NUM_TOKENS, whole, None


def sampling(**changes: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, **changes)


def check(engine: Engine, requests: Sequence[SamplingParams]) -> list[Completion]:
    outputs = engine.generate([PROMPT] * len(requests), requests)
    completions = [output.completions[0] for output in outputs]
    for params, completion in zip(requests, completions, strict=True):
        num_tokens, text, stop = expected(params)
        assert completion.token_ids == tuple((IDS * 3)[:num_tokens])
        assert (completion.text, completion.stop_reason) == (text, stop), params
        assert completion.finish_reason == ("length" if stop is None else "stop")
    return completions


STOPS = [SAID[i:j] for i in range(len(SAID)) for j in range(i + 1, min(i + 5, len(SAID) + 1))]


def spans_recovered_and_accepted(completion: Completion, stop: str) -> bool:
    num_bytes = len(stop.encode())
    return len(set(completion.sources[-num_bytes:]) & {"accepted", "recovered"}) == 2


@pytest.mark.parametrize("k", [1, 3, 6])
def test_every_stop_string_at_every_place_of_every_block(target: TabularModel, k: int) -> None:
    num_spanning = 0
    for place in range(len(IDS)):
        engine = tiny.engine_over(target, ErrsAt(place), k=k)
        completions = check(engine, [sampling(stop=(stop, "never said")) for stop in STOPS])
        num_spanning += sum(map(spans_recovered_and_accepted, completions, STOPS))
    assert num_spanning > 30


def test_blocks_and_recovered_tokens_are_where_the_tests_want_them(target: TabularModel) -> None:
    engine = tiny.engine_over(target, ErrsAt(4), k=3)
    (completion,) = check(engine, [sampling()])
    accepted, recovered, bonus = (TokenSource(s) for s in ("accepted", "recovered", "bonus"))
    # The prompt is one token, so the first pass verifies a block; its fifth token is wrong.
    assert completion.sources[:7] == (*[accepted] * 3, bonus, recovered, accepted, accepted)


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("min_tokens", [0, 1, 6, 8, 12, 13, 20])
def test_min_tokens_let_a_stop_string_pass(target: TabularModel, min_tokens: int, k: int) -> None:
    """What ends before enough tokens are out is text; what begins before and ends after stops."""
    engine = tiny.engine_over(target, ErrsAt(2), k=k)
    stops = [("z",), ("öx",), ("😀",), ("z-a",), ("bx",), ("😀yz", "z-")]
    check(engine, [sampling(stop=stop, min_tokens=min_tokens) for stop in stops])


@pytest.mark.parametrize("k", [0, 4])
def test_the_stop_string_is_kept_where_asked_for(target: TabularModel, k: int) -> None:
    engine = tiny.engine_over(target, ErrsAt(5), k=k)
    changes = {"include_stop_str_in_output": True}
    check(engine, [sampling(stop=(stop,), **changes) for stop in STOPS])
    check(engine, [sampling(stop=("😀yz", "yz", "z-"), **changes)])


def test_nothing_after_a_kept_stop_string_is_shown() -> None:
    """One token may hold the stop string and more."""
    ids = tiny.tokenizer().encode("def")
    long = next(t for t in ids if len(tiny.tokenizer().token_bytes(t)) > 1)
    said = tiny.tokenizer().token_bytes(long).decode()
    law = torch.full((tiny.VOCAB_SIZE + 1, tiny.VOCAB_SIZE), -torch.inf, dtype=torch.float64)
    law[:, long] = 0.0
    store = tiny.tabular(0, vocab_size=tiny.VOCAB_SIZE, order=1).store
    engine = tiny.engine_over(TabularModel(log_probs=law, order=1, store=store))
    for included, text in ((True, said[0]), (False, "")):
        params = sampling(stop=(said[0],), include_stop_str_in_output=included)
        assert engine.generate([[1]], params)[0].text == text
        assert [chunk.text for chunk in engine.stream([1], params)] == [text]


def test_the_text_of_a_stop_token_is_kept_where_asked_for(target: TabularModel) -> None:
    engine = tiny.engine_over(target, ErrsAt(0), k=3)
    changes: dict[str, object] = {"stop_token_ids": (token_of(ord("z")),)}
    without, kept = engine.generate(
        [PROMPT] * 2,
        [sampling(**changes), sampling(include_stop_str_in_output=True, **changes)],
    )
    assert without.token_ids == kept.token_ids
    assert (without.text, kept.text) == ("xö😀y", "xö😀yz")


@pytest.mark.parametrize("included", [True, False])
@pytest.mark.parametrize("k", [1, 4])
def test_streams_show_what_stays(target: TabularModel, k: int, included: bool) -> None:
    for place in range(0, len(IDS), 3):
        engine = tiny.engine_over(target, ErrsAt(place), k=k)
        for stop in STOPS[::4]:
            params = sampling(stop=(stop,), include_stop_str_in_output=included, min_tokens=3)
            chunks = list(engine.stream(PROMPT, params))
            assert "".join(chunk.text for chunk in chunks) == expected(params)[1]
