"""An exported draft in transformers' own assisted generation accepts what is predicted of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from tests import tiny
from tests.unit.align.export.conftest import Pair
from torch import Tensor
from transformers import AutoModelForCausalLM

from forerun.align.objectives import DenseDistribution, acceptance_probability
from forerun.align.serving import describe_pair, export_draft
from forerun.engine.engine import Engine
from forerun.engine.observing import EmittedRecords
from forerun.sampling.config import SamplingParams

K, NUM_NEW = 4, 48
PROMPT = tiny.tokenizer().encode(tiny.PROMPTS[0])


@dataclass
class Assisted:
    """Target and draft as transformers loads them, and where every step of theirs began.

    Attributes:
        lengths: tokens of each verifying pass, drafted ones included.
    """

    target: Any
    draft: Any
    lengths: list[int] = field(default_factory=list)

    def generate(self, prompt: list[int], num_new: int, **settings: Any) -> list[int]:
        ids = torch.tensor([prompt])
        output = self.target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=self.draft,
            max_new_tokens=num_new,
            pad_token_id=0,
            eos_token_id=None,
            **settings,
        )
        found: list[int] = output[0, len(prompt) :].tolist()
        return found

    def steps(self, k: int, end: int) -> Iterator[tuple[int, int]]:
        """Tokens there were before each step, and how many it accepted; up to `end` tokens.

        Passes that reach the last token but one may have drafted fewer than k.
        """
        starts = [length - k for length in self.lengths]
        for start, following in pairwise(starts):
            if following + k < end - 1:
                yield start, following - start - 1


def load(folder: object) -> Any:
    untyped: Any = AutoModelForCausalLM
    return untyped.from_pretrained(folder, dtype=torch.float32).eval()


def assisted(pair: Pair, k: int, sampling: SamplingParams) -> Assisted:
    """Export, then load as the page says."""
    export_draft(["hf"], describe_pair(str(pair.target), pair.draft, k, sampling))
    loaded = Assisted(load(pair.target), load(pair.draft))
    forward = loaded.target.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        loaded.lengths.append(kwargs["attention_mask"].shape[-1])
        return forward(*args, **kwargs)

    loaded.target.forward = counted
    return loaded


@torch.no_grad()
def continued(model: Any, ids: list[int], num_new: int) -> list[int]:
    """Greedily, without any of transformers' generation."""
    for _ in range(num_new):
        ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
    return ids


def test_greedily_it_accepts_at_every_step_what_the_draft_gets_right(pair: Pair) -> None:
    models = assisted(pair, K, SamplingParams(temperature=0))
    found = models.generate(PROMPT, NUM_NEW, do_sample=False)
    # The target's text goes on past the last step, as predictions look K tokens ahead.
    text = continued(load(pair.target), PROMPT, NUM_NEW + K)
    assert found == text[len(PROMPT) : len(PROMPT) + NUM_NEW]
    steps = list(models.steps(K, len(PROMPT) + NUM_NEW))
    assert len(steps) >= 5
    accepted = []
    for start, _ in steps:
        guess = continued(models.draft, text[:start], K)[start:]
        right = [ours == theirs for ours, theirs in zip(guess, text[start:], strict=False)]
        accepted.append((*right, False).index(False))
    assert [count for _, count in steps] == accepted
    assert 0 < sum(accepted) < K * len(accepted)


def test_our_engine_accepts_the_same_from_the_same_place(pair: Pair) -> None:
    models = assisted(pair, K, SamplingParams(temperature=0))
    found = models.generate(PROMPT, NUM_NEW, do_sample=False)
    theirs = dict(models.steps(K, len(PROMPT) + NUM_NEW))
    engine = Engine.load(
        pair.target, pair.draft, device="cpu", dtype="fp32", config=tiny.settings(K)
    )
    records: list[Any] = []
    engine.observers[:] = [EmittedRecords(records.append)]
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    (output,) = engine.generate([PROMPT], params)
    assert list(output.token_ids) == found
    ours = {record.context_tokens: record.num_accepted for record in records}
    common = ours.keys() & theirs.keys()
    assert len(common) >= 3
    assert {place: ours[place] for place in common} == {place: theirs[place] for place in common}


def distribution_at(model: Any, ids: list[int], temperature: float) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([ids])).logits[:, -1] / temperature
    return logits.float()


def test_sampled_it_accepts_with_the_predicted_probability(pair: Pair) -> None:
    """Of single drafted tokens over many texts; the prediction sums alpha over the very steps."""
    temperature = 0.5  # at 1 a draft that ignores the temperature would pass
    sampling = SamplingParams(temperature=temperature)
    models = assisted(pair, 1, sampling)
    target, draft = load(pair.target), load(pair.draft)
    num_accepted, expected, variance = 0, 0.0, 0.0
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(10):
            models.lengths.clear()
            settings = {"temperature": temperature, "top_k": 0, "do_sample": True}
            text = [*PROMPT, *models.generate(PROMPT, 40, **settings)]
            for start, accepted in models.steps(1, len(text)):
                distribution = distribution_at(target, text[:start], temperature).softmax(-1)
                logits = distribution_at(draft, text[:start], temperature)
                alpha = acceptance_probability(
                    logits, DenseDistribution(target_probs=distribution), temperature
                )
                num_accepted += accepted
                expected += float(alpha)
                variance += float(alpha * (1 - alpha))
    assert variance > 20
    assert abs(num_accepted - expected) < 3 * variance**0.5
