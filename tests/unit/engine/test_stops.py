"""Where a text ends, and what a reader sees of it, inside blocks that were accepted whole."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests import tiny
from tests.tabular import TabularModel

from forerun.engine.engine import Engine
from forerun.engine.results import Completion, RequestOutput
from forerun.models.tokenizers import Detokenizer
from forerun.sampling.config import SamplingParams

pytestmark = pytest.mark.usefixtures("unchecked")

NUM_TOKENS = 20
PROMPT = [5, 6]
SEEDS = range(3)


@pytest.fixture(scope="module")
def target() -> TabularModel:
    """All tokens of the tokenizer, so that texts have merges and broken characters in them."""
    return tiny.tabular(3, vocab_size=tiny.VOCAB_SIZE, order=1, scale=3.0)


@pytest.fixture(scope="module")
def plain(target: TabularModel) -> Engine:
    return tiny.engine_over(target)


@pytest.fixture(scope="module", params=["itself", "cousin"])
def spec(target: TabularModel, request: pytest.FixtureRequest) -> Engine:
    """Whole blocks are accepted from a draft that is the target, parts of them from a cousin."""
    scale = 0.0 if request.param == "itself" else 1.0
    return tiny.engine_over(target, tiny.drafting(tiny.cousin(target, 5, scale=scale)), k=5)


@pytest.fixture(scope="module")
def reference(plain: Engine) -> list[tuple[int, ...]]:
    """What plain decoding says for every seed when nothing stops it."""
    params = [sampling(seed) for seed in SEEDS]
    return [output.token_ids for output in plain.generate([PROMPT] * len(params), params)]


def sampling(seed: int, **changes: object) -> SamplingParams:
    defaults = {"seed": seed, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return SamplingParams(**(defaults | changes))


def decoded(ids: Sequence[int], *, finished: bool = True) -> str:
    detokenizer = Detokenizer(tiny.tokenizer())
    for token in ids:
        detokenizer.append(token)
    if finished:
        detokenizer.finish()
    return detokenizer.text


def only(output: RequestOutput) -> Completion:
    (completion,) = output.completions
    return completion


def test_accepted_blocks_are_long_where_the_draft_is_the_target(target, reference):
    spec = tiny.engine_over(target, tiny.drafting(tiny.cousin(target, 5, scale=0.0)), k=5)
    (output,) = spec.generate([PROMPT], sampling(0, max_tokens=19))
    # One token from the prompt's own pass, then whole blocks.
    assert output.completions[0].acceptance.steps == {(0, 0): 1, (5, 5): 3}
    assert output.token_ids == reference[0][:19]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stop_token_anywhere_in_a_block(spec, reference, seed):
    params = [sampling(seed, stop_token_ids=(token,)) for token in reference[seed]]
    for token, output in zip(
        reference[seed], spec.generate([PROMPT] * len(params), params), strict=True
    ):
        end = reference[seed].index(token)
        completion = only(output)
        assert completion.token_ids == reference[seed][: end + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", token)
        assert completion.text == decoded(reference[seed][:end])


@pytest.mark.parametrize("seed", SEEDS)
def test_max_tokens_anywhere_in_a_block(spec, reference, seed):
    lengths = range(1, NUM_TOKENS)
    params = [sampling(seed, max_tokens=length) for length in lengths]
    for length, output in zip(lengths, spec.generate([PROMPT] * len(params), params), strict=True):
        completion = only(output)
        assert completion.token_ids == reference[seed][:length]
        assert (completion.finish_reason, completion.stop_reason) == ("length", None)
        assert completion.text == decoded(reference[seed][:length])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stop_string_across_tokens_and_blocks(spec, reference, seed):
    full = decoded(reference[seed], finished=False)
    strings = [full[i : i + size] for size in (1, 2, 5) for i in range(0, len(full) - size, 4)]
    params = [sampling(seed, stop=(string, "never said")) for string in strings]
    for string, output in zip(strings, spec.generate([PROMPT] * len(params), params), strict=True):
        prefixes = (reference[seed][:end] for end in range(NUM_TOKENS + 1))
        needed = next(ids for ids in prefixes if string in decoded(ids, finished=False))
        completion = only(output)
        assert completion.text == full[: full.find(string)]
        assert completion.token_ids == needed
        assert (completion.finish_reason, completion.stop_reason) == ("stop", string)


def test_eos_ends_the_text_and_is_not_in_it():
    target = tiny.tabular(1, vocab_size=7)
    spec = tiny.engine_over(target, tiny.drafting(tiny.cousin(target, 5), 7), k=5)
    seeds = range(16)
    free = spec.generate([PROMPT] * 16, [sampling(seed) for seed in seeds])
    ended = spec.generate([PROMPT] * 16, [sampling(seed, ignore_eos=False) for seed in seeds])
    num_ended = 0
    for full, cut in zip(free, ended, strict=True):
        completion = only(cut)
        if tiny.EOS not in full.token_ids:
            assert (completion.token_ids, completion.finish_reason) == (full.token_ids, "length")
            continue
        num_ended += 1
        end = full.token_ids.index(tiny.EOS)
        assert completion.token_ids == full.token_ids[: end + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
        assert completion.text == decoded(full.token_ids[:end])
    assert num_ended > 8


def test_min_tokens_holds_the_end_back_as_plain_decoding_does():
    target = tiny.tabular(1, vocab_size=7)
    plain = tiny.engine_over(target)
    spec = tiny.engine_over(target, tiny.drafting(tiny.cousin(target, 5), 7), k=5)
    params = [
        sampling(seed, min_tokens=7, ignore_eos=False, stop_token_ids=(2,), stop=("#",))
        for seed in range(12)
    ]
    expected = plain.generate([PROMPT[:1]] * 12, params)
    found = spec.generate([PROMPT[:1]] * 12, params)
    lengths = set()
    for one, other in zip(expected, found, strict=True):
        assert (one.token_ids, one.text) == (other.token_ids, other.text)
        assert only(one).finish_reason == only(other).finish_reason
        assert not {0, 2} & set(one.token_ids[:7])
        lengths.add(len(one.token_ids))
    assert min(lengths) == 8
    assert len(lengths) > 2


@pytest.mark.parametrize("changes", [{"ignore_eos": False}, {"stop": ("%",)}])
def test_a_stop_at_the_last_token_is_a_stop(changes):
    """Id 0 ends the text, id 5 is "%"."""
    law = torch.full((7, 6), -torch.inf, dtype=torch.float64)
    law[:, 3] = 0.0  # after 3 comes the stopping token, after everything else 3
    law[3] = -torch.inf
    law[3, 0 if "ignore_eos" in changes else 5] = 0.0
    source = tiny.tabular(0, vocab_size=6, order=1)
    target = TabularModel(log_probs=law, order=1, store=source.store)
    draft = TabularModel(log_probs=law, order=1, store=tiny.tabular(0, order=1).store)
    spec = tiny.engine_over(target, tiny.drafting(draft, 6), k=4)
    params = SamplingParams(**({"temperature": 0, "max_tokens": 2, "ignore_eos": True} | changes))
    completion = only(spec.generate([[1]], params)[0])
    assert len(completion.token_ids) == 2
    assert completion.finish_reason == "stop"
    assert completion.text == decoded([3])


def test_without_max_tokens_the_context_is_filled(plain, spec):
    params = sampling(2, max_tokens=None)
    (expected,), (found,) = plain.generate([PROMPT], params), spec.generate([PROMPT], params)
    assert len(PROMPT) + len(found.token_ids) == tiny.MAX_CONTEXT
    assert found.token_ids == expected.token_ids
    assert only(found).finish_reason == "length"


@pytest.mark.parametrize("seed", SEEDS)
def test_streamed_chunks_add_up_and_nothing_shown_is_cut(spec, reference, seed):
    full = decoded(reference[seed], finished=False)
    middle = len(full) // 2
    stops = [(), (full[middle : middle + 4],), (full[middle : middle + 2], full[middle + 1 :])]
    for stop in stops:
        params = sampling(seed, stop=stop)
        (whole,) = spec.generate([PROMPT], params)
        chunks = list(spec.stream(PROMPT, params))
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert sum((chunk.token_ids for chunk in chunks), ()) == whole.token_ids
        assert sum((chunk.sources for chunk in chunks), ()) == only(whole).sources
        reasons = [chunk.finish_reason for chunk in chunks]
        assert reasons == [None] * (len(chunks) - 1) + [only(whole).finish_reason]


def test_an_unfinished_character_is_shown_once_it_cannot_be_finished():
    """0xC3 begins "é"; nothing follows it."""
    first_byte = next(t for t in range(300) if tiny.tokenizer().token_bytes(t) == b"\xc3")
    law = torch.full((tiny.VOCAB_SIZE + 1, tiny.VOCAB_SIZE), -torch.inf, dtype=torch.float64)
    law[:, first_byte] = 0.0
    source = tiny.tabular(0, vocab_size=tiny.VOCAB_SIZE, order=1)
    engine = tiny.engine_over(TabularModel(log_probs=law, order=1, store=source.store))
    params = SamplingParams(temperature=0, max_tokens=2)
    assert [chunk.text for chunk in engine.stream([1], params)] == ["", "\ufffd\ufffd"]
    assert engine.generate([[1]], params)[0].text == "\ufffd\ufffd"


def test_closing_a_stream_aborts_its_request(target):
    draft = tiny.cousin(target, 5)
    spec = tiny.engine_over(target, tiny.drafting(draft))
    stream = spec.stream(PROMPT, sampling(0))
    assert next(stream).token_ids
    stream.close()
    assert not spec.has_unfinished
    assert (target.store.num_free, draft.store.num_free) == (4, 4)


def test_a_stream_ends_when_its_request_is_aborted(spec):
    stream = spec.stream(PROMPT, sampling(0))
    spec.abort(next(stream).request_id)
    assert list(stream) == []


@pytest.mark.parametrize("params", [sampling(1), sampling(1, temperature=0)])
def test_logprobs_are_the_models_own(target, spec, params):
    """Before temperature, bias and truncation, whatever was accepted or recovered."""
    shaped = SamplingParams(
        seed=params.seed,
        temperature=params.temperature,
        max_tokens=NUM_TOKENS,
        stop_token_ids=(3,),
        top_k=40,
        logit_bias={7: 2.0},
        logprobs=3,
    )
    (output,) = spec.generate([PROMPT], shaped)
    entries = only(output).logprobs
    assert entries is not None
    assert tuple(entry.token_id for entry in entries) == output.token_ids
    ids = list(PROMPT)
    for entry in entries:
        expected = target.log_probs[target.state_of(ids)]
        assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=1e-5)
        top = expected.topk(3)
        assert [token for token, _ in entry.top] == top.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(top.values.tolist(), abs=1e-5)
        ids.append(entry.token_id)


def test_logprobs_come_only_where_asked_for(spec):
    asked, not_asked, token_only = spec.generate(
        [PROMPT] * 3, [sampling(1, logprobs=2), sampling(1), sampling(1, logprobs=0)]
    )
    assert only(not_asked).logprobs is None
    assert [entry.top for entry in only(token_only).logprobs] == [()] * NUM_TOKENS
    assert [e.logprob for e in only(token_only).logprobs] == pytest.approx(
        [e.logprob for e in only(asked).logprobs]
    )
