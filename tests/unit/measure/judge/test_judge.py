from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.tiny import PROMPTS, adapted, drafting, engine_over, network, tokenizer

from forerun.drafters.suffix import SuffixDrafter
from forerun.errors import InvalidRequest
from forerun.measure.judge import EvaluationPrompt, Judge, evenly_spaced
from forerun.sampling.config import SamplingParams
from forerun.theory.cost import CostLine, CostTable

K = 3
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1, max_tokens=24, ignore_eos=True)
FREE = CostTable(lines=(CostLine(rows=(1, K + 1), verify_s=(1.0, 1.0), plain_s=1.0, draft_s=0.0),))
HELD_OUT = [
    EvaluationPrompt(prompt_ids=tuple(tokenizer().encode(text)), tag="ab"[index % 2])
    for index, text in enumerate(PROMPTS)
]

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def target():
    return network(seed=1)


@pytest.fixture(scope="module")
def cousin():
    return network(seed=1, jitter=0.02)


def judge_of(target, params, **changes):
    settings = {"prompts": HELD_OUT, "params": params, "num_speculative_tokens": K}
    return Judge(engine=engine_over(adapted(target), k=K), **(settings | changes))


def as_draft(model):
    return drafting(adapted(model))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_target_as_its_own_draft_is_always_accepted(target, params):
    figures = judge_of(target, params).judge(as_draft(target)).overall
    assert figures.acceptance_length.estimate == K + 1
    assert [beta.estimate for beta in figures.acceptance_rate_per_position] == [1.0] * K
    assert figures.acceptance_probability.estimate == pytest.approx(1.0, abs=1e-5)


def test_greedy_figures_are_matches_with_the_targets_own_text(target, cousin):
    """Recounted from one plain pass of each network over each text, step by step."""
    judge = judge_of(target, GREEDY)
    figures = judge.judge(as_draft(cousin))
    emitted = steps = matches = positions = 0
    for prompt, judged, response in zip(
        HELD_OUT, figures.prompts, judge.responses(range(len(HELD_OUT))), strict=True
    ):
        ids = torch.tensor([[*prompt.prompt_ids, *response]])
        first, last = len(prompt.prompt_ids) - 1, ids.shape[1] - 1
        assert target(ids).logits[0, first:last].argmax(-1).tolist() == list(response)
        agrees = cousin(ids).logits[0, first:last].argmax(-1) == ids[0, first + 1 :]
        positions += len(judged.alphas)
        matches += int(agrees[: len(judged.alphas)].sum())
        place = min(1, first)  # the prefill yields a token; a prompt of one is none
        while place < judged.num_tokens and len(response) - place > K:
            run = agrees[place : place + K].int().cumprod(0).sum().item()
            emitted, steps, place = emitted + run + 1, steps + 1, place + run + 1
    assert 0 < matches < positions
    assert figures.overall.acceptance_probability.estimate == pytest.approx(matches / positions)
    assert figures.overall.num_steps == steps
    assert figures.overall.acceptance_length.estimate == pytest.approx(emitted / steps)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.7, "top_k": 20},
        {"repetition_penalty": 1.3},
        {"draft_temperature": 0.0},
    ],
    ids=["plain", "truncated", "penalised", "greedy draft"],
)
def test_alpha_is_the_overlap_of_the_deployed_distributions(target, cousin, changes):
    params = replace(SAMPLED, **changes)
    judge = judge_of(target, params)
    figures = judge.judge(as_draft(cousin), max_prompts=2)
    wanted = []
    chosen = evenly_spaced(len(HELD_OUT), 2)
    for index, response in zip(chosen, judge.responses(chosen), strict=True):
        ids = torch.tensor([[*HELD_OUT[index].prompt_ids, *response]])
        for end in range(len(HELD_OUT[index].prompt_ids), ids.shape[1]):
            target_distribution, draft_distribution = (
                distribution_of(model(ids[:, :end]).logits[0, -1], ids[0, :end], params)
                for model in (target, cousin)
            )
            if params.draft_temperature == 0:
                draft_distribution = torch.nn.functional.one_hot(
                    draft_distribution.argmax(), len(draft_distribution)
                )
            wanted.append(torch.minimum(target_distribution, draft_distribution).sum().item())
    found = [alpha for prompt in figures.prompts for alpha in prompt.alphas]
    assert found == pytest.approx(wanted[: len(found)], abs=1e-5)
    assert len(found) == len(wanted)  # none of these texts loops


def distribution_of(logits, seen, params):
    """Repetition penalty, temperature and top_k as their definitions have them."""
    logits = logits.clone()
    for token in seen.unique().tolist():
        factor = params.repetition_penalty
        logits[token] *= factor if logits[token] < 0 else 1 / factor
    logits /= params.temperature
    if params.top_k:
        logits[logits < logits.topk(params.top_k).values[-1]] = -torch.inf
    return logits.softmax(-1)


def test_a_judgement_is_a_function_of_its_arguments(target, cousin):
    judge = judge_of(target, SAMPLED)
    first = judge.judge(as_draft(cousin), name="cousin")
    assert first == judge.judge(as_draft(cousin), name="cousin")
    assert first == judge_of(target, SAMPLED).judge(as_draft(cousin), name="cousin")
    assert first != judge_of(target, SAMPLED, seed=1).judge(as_draft(cousin), name="cousin")


def test_the_target_answers_once(target, cousin):
    judge = judge_of(target, SAMPLED)
    judge.judge(as_draft(cousin), max_prompts=2)
    given = [prompt.response_ids for prompt in judge.prompts]
    assert [ids is not None for ids in given] == [True, False, True, False]
    judge.prompts[0] = replace(judge.prompts[0], response_ids=given[0][:5])
    assert len(judge.judge(as_draft(cousin)).prompts[0].alphas) == 5
    assert all(prompt.response_ids is None for prompt in judge.at(0.0).prompts)


def test_tags_are_judged_apart_and_free_drafts_pay_their_tau(target, cousin):
    figures = judge_of(target, SAMPLED, costs=FREE).judge(as_draft(cousin))
    assert sorted(figures.by_tag) == ["a", "b"]
    assert sum(f.num_steps for f in figures.by_tag.values()) == figures.overall.num_steps
    speedup = figures.overall.speedup
    assert speedup.num_speculative_tokens == K
    assert speedup.per_k[K - 1].estimate == figures.overall.acceptance_length.estimate


def test_a_drafter_without_a_model_has_no_alpha(target):
    figures = judge_of(target, GREEDY).judge(SuffixDrafter()).overall
    assert figures.acceptance_probability is None
    assert figures.acceptance_length.estimate >= 1.0


def test_prompts_are_taken_evenly():
    assert evenly_spaced(10, 4) == [0, 2, 5, 7]
    assert evenly_spaced(3, 8) == evenly_spaced(3, None) == [0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": HELD_OUT[:1]}, "1 held-out prompts"),
        ({"num_speculative_tokens": K + 1}, "loaded for 1 to 3"),
        ({"num_speculative_tokens": 0}, "loaded for 1 to 3"),
    ],
)
def test_judging_that_would_say_nothing_is_refused(target, changes, message):
    with pytest.raises(InvalidRequest, match=message):
        judge_of(target, GREEDY, **changes)
