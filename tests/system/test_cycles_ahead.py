"""Cycles computed ahead by the kernels are those that the steps in Python would have taken."""

from __future__ import annotations

import signal
from dataclasses import replace
from itertools import chain

import pytest
import torch
from msgspec.structs import asdict
from tests import tiny
from tests.heads import eagle3_drafter, eagle3_head
from tests.natives import native_model
from tests.system.test_engine_identity import REQUESTS

from forerun.control.base import Controller, Decision, Plan
from forerun.drafters.draft_model import SelfDraft
from forerun.drafters.registry import SeveralDrafters
from forerun.drafters.suffix import SuffixDrafter
from forerun.engine.config import EngineConfig, RequestTerms
from forerun.engine.engine import Engine
from forerun.engine.loading import default_controller
from forerun.engine.observing import EmittedRecords
from forerun.engine.step import CycleClock, Stepper
from forerun.errors import NumericalError
from forerun.models.runner import cycles
from forerun.models.runner.cycles import CycleCalls
from forerun.sampling.config import SamplingParams

pytestmark = pytest.mark.usefixtures("unchecked")

TIMES = ("t_s", "draft_s", "verify_s", "other_s", "request_id")
BASE = SamplingParams(seed=3, max_tokens=24, ignore_eos=True)
RULES = {
    "greedy": replace(BASE, temperature=0),
    "coupled": BASE,
    "warm": replace(BASE, temperature=1.7),
    "walk": replace(BASE, verification="walk"),
    "block": replace(BASE, verification="block"),
    "token": replace(BASE, verification="token"),
    "greedy nucleus": replace(BASE, temperature=0, top_p=0.5),
    "nucleus": replace(BASE, top_p=0.8),
    "truncated": replace(
        BASE, temperature=1.7, min_p=0.02, top_k=6, top_p=0.9, draft_temperature=1
    ),
    "truncated block": replace(BASE, verification="block", top_k=8, top_p=0.9),
}
LENGTHS = (24, 7, 1, 16, 24)


def model(**changes):
    dtype = changes.pop("dtype", torch.bfloat16)
    capacity = changes.pop("capacity", tiny.MAX_CONTEXT)
    return native_model(tiny.network(**changes), dtype=dtype, max_context=capacity)


@pytest.fixture(scope="module")
def target():
    return model()


@pytest.fixture
def taken(monkeypatch):
    """Steps that were taken from cycles computed ahead."""
    found = []
    commit = Stepper._commit

    def counted(self, fed, emitting, clock):
        if isinstance(clock, CycleClock):
            found.append(len(fed))
        commit(self, fed, emitting, clock)

    monkeypatch.setattr(Stepper, "_commit", counted)
    return found


def run(
    target, draft, requests, ahead, *, k=3, terms=None, self_draft=False, drafter=None, **changes
):
    """Texts, and what the records say beside times, with cycles ahead or without."""
    if draft is not None:
        drafter = tiny.drafting(draft)
    if self_draft:
        drafter = SelfDraft(draft, draft.vocab_size)
    engine = tiny.engine_over(target, drafter, k=k, cycles_per_call=8 if ahead else 1, **changes)
    records = []
    engine.observers.append(EmittedRecords(records.append))
    outputs = engine.generate([p for p, _ in requests], [s for _, s in requests], terms)
    texts = [(o.text, o.token_ids, o.completions[0].finish_reason) for o in outputs]
    kept = []
    for record in records:
        values = asdict(record)
        kept.append({name: value for name, value in values.items() if name not in TIMES})
    return texts, kept


def same(target, draft, requests, taken, **options):
    expected = run(target, draft, requests, ahead=False, **options)
    assert not taken
    found = run(target, draft, requests, ahead=True, **options)
    assert found[0] == expected[0]
    assert found[1] == expected[1]
    return len(taken)


@pytest.mark.covering(2)
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("draft", [None, "cousin", "itself"])
def test_texts_and_records_are_those_of_single_steps(target, taken, draft, rule, k):
    changes = {} if draft == "itself" else {"jitter": 0.02}
    loaded = None if draft is None else model(**changes)
    requests = [
        (prompt, replace(RULES[rule], max_tokens=length))
        for prompt, length in zip((*tiny.PROMPTS, *tiny.PROMPTS)[:5], LENGTHS, strict=True)
    ]
    assert same(target, loaded, requests, taken, k=k) > 3


@pytest.mark.covering
@pytest.mark.parametrize("rule", ["coupled", "walk", "block", "token"])
@pytest.mark.parametrize("draft", [None, "cousin"])
def test_every_row_is_cut_by_the_parameters_of_its_own_request(target, taken, draft, rule):
    """Requests that ask for nothing, top_p, top_k and min_p share the passes."""
    cuts = ({}, {"top_p": 0.5}, {"top_k": 3, "temperature": 1.7}, {"min_p": 0.2})
    params = [replace(RULES[rule], **cut) for cut in cuts]
    requests = [*zip(tiny.PROMPTS, params, strict=True)]
    loaded = None if draft is None else model(jitter=0.02)
    assert same(target, loaded, requests, taken, k=3, sharing="none") > 3
    assert 4 in taken


@pytest.mark.covering
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("draft", ["int8", "int4", 1])
def test_drafts_of_the_targets_own_weights(target, taken, draft, rule, k):
    loaded = target.first_layers(draft) if draft == 1 else target.in_fewer_bits(draft)
    requests = [
        (prompt, replace(RULES[rule], max_tokens=length))
        for prompt, length in zip((*tiny.PROMPTS, *tiny.PROMPTS)[:5], LENGTHS, strict=True)
    ]
    assert same(target, loaded, requests, taken, k=k, self_draft=True) > 3


def test_in_fp32_too(taken):
    requests = [(prompt, BASE) for prompt in tiny.PROMPTS]
    network = {"dtype": torch.float32}
    assert same(model(**network), model(**network, jitter=0.02), requests, taken) > 5


@pytest.mark.parametrize(
    "changes",
    [{"max_batch": 1}, {"prefill_chunk": 2}, {"max_kv_tokens": 110}, {"max_context": 40}],
    ids=str,
)
def test_batches_that_change_and_requests_of_every_kind(target, taken, changes):
    """Among them are penalties, masks, stop tokens and log-probabilities."""
    requests = [*REQUESTS, *((prompt, BASE) for prompt in tiny.PROMPTS)]
    requests += [(tiny.PROMPTS[0], replace(BASE, logprobs=2))]
    same(target, model(jitter=0.02), requests, taken, **changes)


def test_a_text_ends_within_cycles_at_tokens_and_strings(target, taken):
    [(_, ids, _)], _ = run(target, None, [(tiny.PROMPTS[0], BASE)], ahead=False)
    text = tiny.tokenizer().decode(list(ids))
    stops = [
        replace(BASE, stop_token_ids=(ids[9],)),
        replace(BASE, stop=(text[12:15],)),
        replace(BASE, stop_token_ids=(ids[5],), min_tokens=8),
    ]
    for params in stops:
        taken.clear()
        found = same(target, model(jitter=0.02), [(tiny.PROMPTS[0], params)], taken)
        assert found or params.min_tokens


@pytest.mark.parametrize("controller", ["fixed", "auto"])
def test_under_controllers_the_text_is_the_same(target, taken, controller):
    requests = [(prompt, replace(RULES["coupled"], max_tokens=60)) for prompt in tiny.PROMPTS]
    expected, _ = run(target, None, requests, ahead=False)
    drafter = tiny.drafting(model(jitter=0.02))
    config = replace(tiny.settings(4), controller=controller)
    engine = tiny.engine_over(target, drafter, controller=default_controller(config, drafter, {}))
    outputs = engine.generate([p for p, _ in requests], [s for _, s in requests])
    assert [o.token_ids for o in outputs] == [ids for _, ids, _ in expected]
    assert taken


def test_speculation_off_beside_requests_that_draft(target, taken):
    terms = RequestTerms(speculation="off")
    same(target, model(jitter=0.02), [(tiny.PROMPTS[0], BASE)] * 2, taken, terms=terms)


def test_requests_that_come_and_go_between_cycles(target):
    """A request added or aborted between two steps drops what was computed ahead."""

    def texts(ahead):
        drafter = tiny.drafting(model(jitter=0.02))
        engine = tiny.engine_over(target, drafter, cycles_per_call=8 if ahead else 1)
        ids = [engine.add_request(tiny.PROMPTS[0], BASE), engine.add_request("x", BASE)]
        for at in range(12):
            if at == 3:
                ids.append(engine.add_request(tiny.PROMPTS[1], BASE))
            if at == 5:
                engine.abort(ids[1])
            engine.step()
        while engine.has_unfinished:
            engine.step()
        return [engine.take_output(ids[at]).token_ids for at in (0, 2)]

    assert texts(ahead=True) == texts(ahead=False)


class Alternating(Controller):
    """Four steps of one drafter and three of the other."""

    def __init__(self, first="draft_model"):
        self.first = first
        self.num_decided = 0

    def decide(self, states, capacity):
        self.num_decided += 1
        is_first = self.num_decided % 2
        plans = [Plan.chain(self.first if is_first else "suffix", 3) for _ in states]
        return Decision(plans, 4 if is_first else 3)

    def observe(self, records):
        pass


@pytest.mark.parametrize("rule", ["greedy", "coupled", "block", "nucleus"])
def test_a_draft_model_beside_a_suffix_drafter(target, taken, rule):
    """Steps in which the latter drafts are steps of Python."""
    requests = [(prompt, replace(RULES[rule], max_tokens=60)) for prompt in tiny.PROMPTS]

    def found(ahead):
        both = {"draft_model": tiny.drafting(model(jitter=0.02)), "suffix": SuffixDrafter()}
        options = {"controller": Alternating(), "ahead": ahead, "sharing": "none"}
        return run(target, None, requests, drafter=SeveralDrafters(both), **options)

    expected = found(ahead=False)
    assert not taken
    assert found(ahead=True) == expected
    assert 10 < len(taken) < len({record["cycle_id"] for record in expected[1]})


def test_no_cycle_is_computed_beyond_the_pause_of_a_drafter(target, taken, monkeypatch):
    """It would be discarded when the drafter is asked again."""
    computed, run_cycles = [], CycleCalls.run

    def counted(self, batch, most):
        found = run_cycles(self, batch, most)
        computed.append(len(found))
        return found

    monkeypatch.setattr(CycleCalls, "run", counted)
    engine = tiny.engine_over(target, SuffixDrafter(), k=3)
    engine.generate([tiny.PROMPTS[0]], replace(BASE, max_tokens=60, temperature=1.7))
    assert len(taken) > 10
    assert sum(computed) == len(taken)


@pytest.fixture(scope="module")
def shipped():
    config = EngineConfig(
        max_batch=3, max_context=128, num_threads=1, controller="fixed", runner="native"
    )
    return Engine.load("zoo:code-40m", "zoo:eagle3-for-40m", config=config)


SHARED = "# Read a file of settings, line by line\nimport os\nimport sys\n\n\n"
CODE = (f"{SHARED}def add(a, b):\n    return", SHARED, f"{SHARED}class Stack:\n    def push(self")


def with_head(shipped, rule, ahead, *, drafter=None, controller=None, **changes):
    """Texts and records of requests of three lengths that an EAGLE-3 head drafts for."""
    config = replace(
        shipped.config, num_speculative_tokens=4, cycles_per_call=8 if ahead else 1, **changes
    )
    for store in (shipped.target.store, shipped.drafter.model.store):
        store.keep_features(())  # which forgets the prefixes of earlier runs
    engine = Engine(
        target=shipped.target,
        tokenizer=shipped.tokenizer,
        drafter=drafter or shipped.drafter,
        controller=controller,
        config=config,
    )
    records = []
    engine.observers.append(EmittedRecords(records.append))
    params = [replace(RULES[rule], max_tokens=length) for length in (32, 9, 24)]
    outputs = engine.generate(CODE, params)
    kept = [{n: v for n, v in asdict(record).items() if n not in TIMES} for record in records]
    return [output.token_ids for output in outputs], kept


@pytest.mark.parametrize("rule", ["greedy", "coupled", "block", "token", "walk", "truncated"])
def test_drafts_of_a_head(shipped, taken, rule):
    expected = with_head(shipped, rule, ahead=False)
    assert not taken
    assert with_head(shipped, rule, ahead=True) == expected
    assert len(taken) > 5
    if rule == "greedy":
        assert sum(record["num_accepted"] for record in expected[1]) > 20


@pytest.mark.parametrize("rule", ["greedy", "block"])
def test_a_head_beside_a_suffix_drafter(shipped, taken, rule):
    """The head gets the features of steps in which the other one drafts, too."""

    def found(ahead):
        both = {"eagle3": shipped.drafter, "suffix": SuffixDrafter()}
        controller = Alternating("eagle3")
        several = SeveralDrafters(both)
        return with_head(shipped, rule, ahead, drafter=several, controller=controller)

    expected = found(ahead=False)
    assert not taken
    assert found(ahead=True) == expected
    assert len(taken) > 5


class Pausing(Controller):
    """Plain steps between those in which the head drafts."""

    def __init__(self):
        self.num_decided = 0

    def decide(self, states, capacity):
        self.num_decided += 1
        k = 3 if self.num_decided % 2 else 0
        return Decision([Plan.chain("eagle3", k) if k else Plan() for _ in states], 2 if k else 3)

    def observe(self, records):
        pass


def test_a_head_reads_the_features_of_plain_cycles(shipped, taken):
    expected = with_head(shipped, "greedy", ahead=False, controller=Pausing())
    assert with_head(shipped, "greedy", ahead=True, controller=Pausing()) == expected
    assert len(taken) > 10


@pytest.mark.covering
@pytest.mark.parametrize("rule", ["greedy", "block"])
@pytest.mark.parametrize(
    "changes",
    [{"max_batch": 1}, {"prefill_chunk": 8}, {"max_kv_tokens": 132}, {"max_context": 70}],
    ids=str,
)
def test_a_head_in_batches_that_change(shipped, taken, rule, changes):
    """Requests wait for each other, continue a shared beginning, and are preempted."""
    expected = with_head(shipped, rule, ahead=False, **changes)
    assert with_head(shipped, rule, ahead=True, **changes) == expected
    assert taken


def test_features_of_other_layers_change_the_drafts(shipped, taken, monkeypatch):
    expected = with_head(shipped, "greedy", ahead=False)
    put = CycleCalls._put_features

    def wrong(self):
        put(self)
        self._layers.reverse()

    monkeypatch.setattr(CycleCalls, "_put_features", wrong)
    texts, records = with_head(shipped, "greedy", ahead=True)
    assert taken
    assert texts == expected[0]
    assert records != expected[1]


@pytest.mark.parametrize("stop", [(), ("no such text",)])
def test_a_stream_joins_what_one_call_computed(target, stop):
    def chunks(ahead):
        drafter = tiny.drafting(model(jitter=0.02))
        engine = tiny.engine_over(target, drafter, cycles_per_call=8 if ahead else 1)
        return [*engine.stream(tiny.PROMPTS[0], replace(BASE, stop=stop))]

    joined, single = chunks(ahead=True), chunks(ahead=False)
    assert len(joined) < len(single)
    for name in ("text", "token_ids", "sources"):
        whole, parts = ([getattr(c, name) for c in found] for found in (joined, single))
        assert sum(map(len, whole)) > 0
        assert [*chain(*whole)] == [*chain(*parts)]


def test_a_stop_string_ends_a_request_in_the_middle_of_a_call(target, taken):
    drafter = tiny.drafting(model(jitter=0.02))
    engine = tiny.engine_over(target, drafter, cycles_per_call=8)
    text = engine.generate([tiny.PROMPTS[0]], BASE)[0].text
    stop = text[len(text) // 2 :][:2]
    taken.clear()
    ended, other = engine.generate(tiny.PROMPTS[:2], replace(BASE, stop=(stop,)))
    assert taken
    assert ended.text == text[: text.index(stop)]
    alone = tiny.engine_over(target, cycles_per_call=1)
    assert other.text == alone.generate([tiny.PROMPTS[1]], replace(BASE, stop=(stop,)))[0].text


def test_an_interrupt_between_cycles_leaves_the_engine_whole(target, monkeypatch):
    engine = tiny.engine_over(target, tiny.drafting(model(jitter=0.02)), cycles_per_call=8)
    expected = engine.generate([tiny.PROMPTS[0]], BASE)[0].token_ids
    take, calls = Stepper._take, []

    def interrupted(self, *args):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return take(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "_take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([tiny.PROMPTS[0]], BASE)
    assert engine.generate([tiny.PROMPTS[0]], BASE)[0].token_ids == expected


@pytest.mark.parametrize("field", [0, 1, 5, 9, 12, 13, 14, 15, 16])
def test_a_member_that_is_described_wrongly_is_noticed(target, taken, monkeypatch, field):
    """Each changes texts or records.

    These are noise key, committed length, rows of the draft, coupling, the two temperatures, min_p,
    top_k and top_p.
    """
    member = cycles.MEMBER

    class Wrong:
        size = member.size

        @staticmethod
        def pack(*values):
            changed = [*values]
            changed[field] = values[field] - 1 if field < 9 else 1 - values[field]
            return member.pack(*changed)

    params = {14: {"min_p": 0.05}, 15: {"top_k": 5}, 16: {"top_p": 0.8}, 12: {"temperature": 0.4}}
    params[13] = params[12]
    requests = [(tiny.PROMPTS[0], replace(BASE, **params.get(field, {})))]
    expected = run(target, model(jitter=0.02), requests, ahead=False)
    monkeypatch.setattr(cycles, "MEMBER", Wrong)
    assert run(target, model(jitter=0.02), requests, ahead=True) != expected
    assert taken


class Rotating(Controller):
    """Plans that differ by request, and change in turn after a number of steps each."""

    def __init__(self, turns):
        self.turns = turns
        self.num_decided = 0

    def decide(self, states, capacity):
        num_steps, plans = self.turns[self.num_decided % len(self.turns)]
        self.num_decided += 1
        numbers = [int(state.request_id.rpartition("-")[2]) for state in states]
        return Decision([plans[number % len(plans)] for number in numbers], num_steps)


def four_requests(rule, max_tokens=80):
    return [(prompt, replace(RULES[rule], max_tokens=max_tokens)) for prompt in tiny.PROMPTS]


def same_under(controller, target, drafter, requests, taken, **options):
    """Texts and records with cycles ahead and without; drafter and controller are made anew."""
    options = {"requests": requests, "sharing": "none", **options}
    expected = run(target, None, ahead=False, drafter=drafter(), controller=controller(), **options)
    assert not taken
    found = run(target, None, ahead=True, drafter=drafter(), controller=controller(), **options)
    assert found == expected
    return expected[1]


SHORT = 64
"""Tokens that a draft of a short context has room for; the texts are longer."""


def unwritten(short):
    """Whether the rows past the context are as they were made: no pass has come to them."""
    return bool(short.store.data[1::2, :, :, SHORT:].isnan().all())


@pytest.mark.covering
@pytest.mark.parametrize("rule", ["greedy", "coupled", "block", "nucleus"])
@pytest.mark.parametrize("k", [1, 4])
def test_a_draft_is_not_run_past_its_own_context(target, taken, rule, k):
    requests = four_requests(rule)
    short = model(jitter=0.02, capacity=SHORT)
    assert same(target, short, requests, taken, k=k, sharing="none") > 3
    assert unwritten(short)


@pytest.mark.parametrize("rule", ["greedy", "coupled", "block"])
def test_a_member_that_drafts_less_shares_the_passes_up_to_its_context(target, taken, rule):
    """All chains are drafted to the largest K, so the member with the smallest needs the room."""
    plans = [Plan.chain("draft_model", k) for k in (4, 2, 1, 4)]
    shorts = []

    def drafter():
        shorts.append(model(jitter=0.02, capacity=SHORT))
        return tiny.drafting(shorts[-1])

    def controller():
        return Rotating([(7, plans)])

    records = same_under(controller, target, drafter, four_requests(rule), taken)
    assert len(taken) > 3
    assert "context" in {record["stop_reason"] for record in records}
    assert all(unwritten(short) for short in shorts)


@pytest.mark.covering
@pytest.mark.parametrize("rule", ["greedy", "coupled", "block", "walk"])
def test_two_draft_models_of_different_contexts(target, taken, rule):
    """Requests take turns with them, together and apart; each has slots in its own store."""
    one, two = Plan.chain("draft_model", 3), Plan.chain("other", 3)
    turns = [(4, [one]), (2, [one, two]), (4, [two]), (2, [two, one, one, two])]

    def drafter():
        drafts = [model(jitter=0.02, capacity=SHORT), model(jitter=0.03, num_layers=1)]
        return SeveralDrafters(
            dict(zip(("draft_model", "other"), map(tiny.drafting, drafts), strict=True))
        )

    def controller():
        return Rotating(turns)

    records = same_under(controller, target, drafter, four_requests(rule), taken)
    assert len(taken) > 5
    assert {record["method"] for record in records} >= {"draft_model", "other"}


@pytest.mark.covering
@pytest.mark.parametrize("rule", ["coupled", "block", "token", "walk", "nucleus"])
@pytest.mark.parametrize("k", [1, 4])
def test_a_draft_that_is_nan_behind_some_tokens(target, taken, rule, k):
    """A chain ends before a distribution that is NaN; one that begins with it is no draft."""
    requests = four_requests(rule)
    texts, _ = run(target, None, requests, ahead=False, sharing="none")
    earliest = {}
    for _, ids, _ in texts:
        earliest |= {token: min(ids.index(token), earliest.get(token, 99)) for token in ids}
    read = {token for prompt in tiny.PROMPTS for token in tiny.tokenizer().encode(prompt)}
    late = sorted(earliest.keys() - read, key=earliest.__getitem__)[-3:]
    network = tiny.network()
    network.model.embed_tokens.weight[late] = float("nan")
    draft = native_model(network, dtype=torch.bfloat16, max_context=tiny.MAX_CONTEXT)
    assert same(target, draft, requests, taken, k=k, sharing="none") > 3
    _, records = run(target, draft, requests, ahead=True, k=k, sharing="none")
    ends = {record["stop_reason"] for record in records}
    assert "invalid_probs" in ends or k == 1 or rule == "coupled"


@pytest.mark.covering
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("rule", ["greedy", "walk", "block"])
def test_a_target_that_is_nan_behind_some_token_emits_nothing_there(target, taken, rule, drafts):
    """A cycle without a distribution is none: the step that Python takes says what is wrong."""
    prompt, params = four_requests(rule)[0]

    def engine_of(target, cycles_per_call):
        drafter = tiny.drafting(model(jitter=0.02)) if drafts else None
        return tiny.engine_over(target, drafter, cycles_per_call=cycles_per_call)

    ids = engine_of(target, 1).generate([prompt], params)[0].token_ids
    read = {*tiny.tokenizer().encode(prompt)}
    place = next(n for n, token in enumerate(ids) if n > 12 and token not in read | {*ids[:n]})
    network = tiny.network()
    network.model.embed_tokens.weight[ids[place]] = float("nan")
    sick = native_model(network, dtype=torch.bfloat16, max_context=tiny.MAX_CONTEXT)
    engine = engine_of(sick, 8)
    engine.add_request(prompt, params)
    emitted = []
    with pytest.raises(NumericalError):
        while engine.has_unfinished:
            for chunk in engine.step():
                emitted += chunk.token_ids
    assert tuple(emitted) == ids[: len(emitted)]
    assert len(emitted) <= place + 1
    assert taken


def test_a_head_that_reads_other_layers_than_the_store_keeps(taken):
    """Of two heads only the one that reads all of them drafts in the kernels."""
    target = model(num_layers=4)
    plans = [Plan.chain(name, 3) for name in ("all", "some")]
    turns = [(4, plans[:1]), (4, plans[1:]), (2, plans)]

    def drafter():
        heads = {
            name: eagle3_drafter(target, eagle3_head(target, seed=seed, feature_layers=layers))
            for seed, (name, layers) in enumerate({"all": (0, 1, 2), "some": (1, 2)}.items())
        }
        return SeveralDrafters(heads)

    def controller():
        return Rotating(turns)

    same_under(controller, target, drafter, four_requests("walk"), taken)
    assert len(taken) > 5


def test_more_cycles_than_the_chains_of_one_buffer(target, taken):
    """Requests of one shape come one after another, so the buffer is filled to its end and renewed.

    Calls of several lengths meet that end in the middle. K is 1, because another K at the end of a
    text would renew the buffer before it is full.
    """
    requests = four_requests("block", 60) * 2
    same(target, model(jitter=0.3), requests, taken, k=1, max_batch=1, sharing="none")
    assert len(taken) > 2 * cycles.Chains.num_cycles
