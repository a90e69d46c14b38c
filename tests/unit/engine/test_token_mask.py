"""A grammar is followed at every K, by every verifier, and seeded text is plain decoding's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests import tiny
from tests.automaton import Automaton
from tests.tabular import TabularModel
from torch import Tensor

from forerun.control.base import Plan
from forerun.drafters.base import Drafter, DraftRequest
from forerun.drafters.draft_model import DraftModel
from forerun.engine.engine import Engine
from forerun.engine.results import RequestOutput
from forerun.errors import MaskError
from forerun.sampling.config import SamplingParams, TokenSource
from forerun.sampling.proposal import Proposal

pytestmark = pytest.mark.usefixtures("unchecked")

VOCAB = 8
PROMPTS = [[1, 2], [7], [3, 3, 4, 5, 6, 1, 2]]
# An opening 1, then pairs of 2 or 3 with 4 to 6 between them, and 0 ends the text after a pair.
TABLE = ({1: 1}, {2: 2, 3: 3, 0: 4}, {4: 2, 5: 2, 2: 1}, {5: 3, 6: 3, 3: 1}, {0: 4, 7: 4})
AUTOMATON = Automaton(TABLE, VOCAB)


def sampling(**changes: object) -> SamplingParams:
    return SamplingParams(**({"seed": 4, "max_tokens": 24, "n": 2} | changes))


PARAMS = {
    "coupled": sampling(),
    "greedy": sampling(temperature=0, n=1),
    "walk": sampling(verification="walk"),
    "penalised": sampling(presence_penalty=0.8, repetition_penalty=1.4),
    "truncated": sampling(top_p=0.8, top_k=3, ignore_eos=True),
    "biased": sampling(bad_token_ids=(6,), logit_bias={5: 2.0}, min_tokens=9),
    "block": sampling(verification="block"),
    "token": sampling(verification="token", temperature=0.8),
}


class Unmasked(DraftModel):
    """Knows nothing of grammars."""

    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | None]:
        for request in requests:
            object.__setattr__(request, "history", None)
        return super().propose(requests, plans)


@pytest.fixture(scope="module")
def target() -> TabularModel:
    return tiny.tabular(0, vocab_size=VOCAB)


def drafters(target: TabularModel) -> dict[str, Drafter]:
    return {
        "cousin": DraftModel(tiny.cousin(target, 5), VOCAB),
        "itself": DraftModel(tiny.cousin(target, 5, scale=0.0), VOCAB),
        "stranger": DraftModel(tiny.tabular(9, vocab_size=VOCAB), VOCAB),
        "unmasked": Unmasked(tiny.cousin(target, 5), VOCAB),
    }


def run(engine: Engine, params: SamplingParams) -> list[RequestOutput]:
    ids = [engine.add_request(prompt, params, mask=AUTOMATON) for prompt in PROMPTS]
    while engine.has_unfinished:
        engine.step()
    return [engine.take_output(request_id) for request_id in ids]


def texts(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [completion.token_ids for output in outputs for completion in output.completions]


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("name", ["cousin", "itself", "stranger", "unmasked"])
@pytest.mark.covering
def test_every_text_follows_the_automaton(
    target: TabularModel, name: str, params: SamplingParams
) -> None:
    expected = texts(run(tiny.engine_over(target), params))
    for k in (1, 3, 7):
        engine = tiny.engine_over(target, drafters(target)[name], k=k)
        found = texts(run(engine, params))
        assert all(map(AUTOMATON.accepts, found))
        if params.greedy or params.verification in ("auto", "walk"):
            assert found == expected
        assert engine.drafter is not None
        assert target.store.num_free == 4
    assert AUTOMATON.state == 0, "every sample has a fork of its own"


def test_the_grammar_matters_and_does_not_decide_everything(target: TabularModel) -> None:
    plain = tiny.engine_over(target)
    free = plain.generate(PROMPTS, PARAMS["coupled"])
    assert not any(map(AUTOMATON.accepts, texts(free)))
    assert len(set(texts(run(plain, PARAMS["coupled"])))) > 3


def test_a_draft_that_sees_the_mask_is_accepted_more_often(target: TabularModel) -> None:
    def num_accepted(name: str) -> int:
        engine = tiny.engine_over(target, drafters(target)[name], k=4)
        outputs = [run(engine, sampling(seed=seed, n=4, ignore_eos=True)) for seed in range(3)]
        return sum(
            completion.sources.count(TokenSource.ACCEPTED)
            for of_seed in outputs
            for output in of_seed
            for completion in output.completions
        )

    assert num_accepted("cousin") > 1.3 * num_accepted("unmasked") > 0


def test_the_end_comes_where_the_mask_allows_it(target: TabularModel) -> None:
    engine = tiny.engine_over(target, drafters(target)["cousin"], k=5)
    ended = [text for seed in range(6) for text in texts(run(engine, sampling(seed=seed)))]
    ended = [text for text in ended if len(text) < 24]
    assert len(ended) > 5
    assert all(text[-1] == tiny.EOS and text.count(tiny.EOS) == 1 for text in ended)


def test_neighbours_without_a_mask_are_left_alone(target: TabularModel) -> None:
    engine = tiny.engine_over(target, drafters(target)["cousin"], k=3)
    (alone,) = engine.generate([[5, 1]], sampling(n=1))
    masked = engine.add_request([7], sampling(), mask=AUTOMATON)
    (beside,) = engine.generate([[5, 1]], sampling(n=1))
    assert beside.token_ids == alone.token_ids
    engine.abort(masked)


class Failing(Automaton):
    """Breaks down where it is told `fatal`."""

    def __init__(
        self,
        fatal: str,
        state: int = 0,
        num_told: int = 0,
        kind: type[BaseException] = KeyError,
    ) -> None:
        super().__init__(TABLE, VOCAB, state)
        self.fatal = fatal
        self.kind = kind
        self.num_told = num_told

    def fail(self, where: str) -> None:
        if where == self.fatal and self.num_told > 4:
            raise self.kind(f"{where} has no rule")

    def fork(self) -> Failing:
        self.fail("fork")
        return Failing(self.fatal, self.state, self.num_told, self.kind)

    def advance(self, token: int) -> None:
        self.fail("advance")
        super().advance(token)
        self.num_told += 1

    def allowed(self) -> Tensor:
        self.fail("allowed")
        return super().allowed()


@pytest.mark.parametrize("kind", [KeyError, SystemExit])
@pytest.mark.parametrize("fatal", ["advance", "allowed"])
@pytest.mark.parametrize("k", [0, 4])
def test_a_mask_that_raises_ends_its_own_request_only(
    target: TabularModel, k: int, fatal: str, kind: type[BaseException]
) -> None:
    engine = tiny.engine_over(target, drafters(target)["cousin"] if k else None, k=k)
    (alone,) = engine.generate([[5, 1]], sampling(n=1, ignore_eos=True))
    sound = engine.add_request([5, 1], sampling(n=1, ignore_eos=True))
    params = sampling(n=1, ignore_eos=True, min_tokens=20)
    sick = engine.add_request([7], params, mask=Failing(fatal, kind=kind))
    with pytest.raises(MaskError, match=f"{fatal} has no rule.*abort it") as failure:
        while engine.has_unfinished:
            engine.step()
    assert failure.value.request_id == sick
    aborted = engine.abort(sick)
    assert aborted is not None
    assert AUTOMATON.accepts(aborted.token_ids)
    while engine.has_unfinished:
        engine.step()
    assert engine.take_output(sound).token_ids == alone.token_ids
    assert target.store.num_free == 4


def test_a_mask_that_cannot_be_forked_is_decoded_plainly(target: TabularModel) -> None:
    engine = tiny.engine_over(target, drafters(target)["cousin"], k=4)
    params = sampling(n=1, ignore_eos=True)
    names = [engine.add_request([7], params, mask=m) for m in (Failing("fork"), AUTOMATON)]
    while engine.has_unfinished:
        engine.step()
    sick, sound = (engine.take_output(name) for name in names)
    assert sick.token_ids == sound.token_ids
    assert sick.completions[0].acceptance.num_steps > sound.completions[0].acceptance.num_steps
