"""What every supported family owes: a line in `tiny.FAMILIES` is all it takes to be asked for it.

The oracle is transformers' own greedy generation, with its own attention and cache. What passes owe
below the engine (trees, committed paths, chunks, shared passes) is in test_language_model.py, which
takes its families from the same table.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from tests import tiny
from tests.contract.test_language_model import BRANCHED, BRANCHED_TOKENS, feed, score, text
from torch import Tensor
from transformers import PreTrainedModel

from forerun.drafters.base import Drafter
from forerun.drafters.draft_model import SelfDraft
from forerun.errors import RunnerUnavailable
from forerun.models import attention
from forerun.models.attention import AttentionPass
from forerun.models.base import Context, LanguageModel
from forerun.models.huggingface import HuggingFaceModel
from forerun.models.load import load_model
from forerun.models.runner.native import NativeModel
from forerun.sampling.config import SamplingParams

pytestmark = pytest.mark.usefixtures("unchecked")

NUM_TOKENS = 18
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=3, max_tokens=NUM_TOKENS)

Ids = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class Member:
    """A family's random network, the same behind a LanguageModel, and what transformers says."""

    family: str
    network: PreTrainedModel
    model: HuggingFaceModel
    expected: Ids
    plain_texts: dict[SamplingParams, Ids] = field(default_factory=dict)

    def plain(self, params: SamplingParams) -> Ids:
        """Texts of plain decoding, made once."""
        if params not in self.plain_texts:
            self.plain_texts[params] = texts(self.model, params)
        return self.plain_texts[params]


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def member(request: pytest.FixtureRequest) -> Member:
    network = tiny.network(request.param)
    return Member(
        family=request.param,
        network=network,
        model=tiny.adapted(network),
        expected=by_transformers(network),
    )


def prompts() -> Ids:
    return [tiny.tokenizer().encode(prompt) for prompt in tiny.PROMPTS]


def by_transformers(network: PreTrainedModel) -> Ids:
    return [continued(network, ids, NUM_TOKENS) for ids in prompts()]


def continued(network: PreTrainedModel, ids: list[int], num_tokens: int) -> list[int]:
    tokens = torch.tensor([ids])
    generated = network.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=tiny.EOS,
    )
    return generated[0, len(ids) :].tolist()


def texts(
    target: LanguageModel,
    params: SamplingParams,
    drafter: Drafter | None = None,
    **changes: int,
) -> Ids:
    engine = tiny.engine_over(target, drafter, k=3, **changes)
    return [list(output.token_ids) for output in engine.generate(prompts(), params)]


def test_texts_are_worth_comparing(member):
    assert len({tuple(ids) for ids in member.expected}) == len(member.expected)
    assert min(len(set(ids)) for ids in member.expected) > 4


def test_plain_text_is_that_of_transformers(member):
    assert member.plain(GREEDY) == member.expected
    assert texts(member.model, GREEDY, prefill_chunk=5) == member.expected


DRAFTERS: dict[str, Callable[[Member], Drafter]] = {
    "stranger": lambda _: tiny.drafting(tiny.adapted(tiny.network(seed=50))),
    "cousin": lambda m: tiny.drafting(tiny.adapted(tiny.network(m.family, jitter=0.02))),
    "first layer": lambda m: SelfDraft(m.model.first_layers(1), m.model.vocab_size),
}


@pytest.mark.covering
@pytest.mark.parametrize("kind", DRAFTERS)
def test_speculation_changes_no_text(member, kind):
    """Drafts that share nothing but the vocabulary, often agree, or live in the target."""
    for params in (GREEDY, SEEDED):
        drafted = texts(member.model, params, DRAFTERS[kind](member))
        assert drafted == member.plain(params)
    assert member.model.store.num_free == 4


# Positions are learned, rotated, or counted within a window; of the rest the full grid is asked.
LAST_POSITIONS = [
    family
    if family in ("llama", "gemma3", "gpt2", "opt", "mistral-sliding")
    else pytest.param(family, marks=pytest.mark.full)
    for family in tiny.FAMILIES
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("member", LAST_POSITIONS, indirect=True)
def test_the_last_position_is_reached(member):
    """Where learned positions end, and drafts must."""
    ids = prompts()[0]
    params = replace(GREEDY, max_tokens=tiny.MAX_CONTEXT)
    expected = continued(member.network, ids, tiny.MAX_CONTEXT - len(ids))
    for drafter in (None, DRAFTERS["cousin"](member)):
        (output,) = tiny.engine_over(member.model, drafter, k=7).generate([ids], params)
        assert list(output.token_ids) == expected


@pytest.mark.one_in(3)
def test_ragged_batch_is_one_by_one(member):
    for params in (GREEDY, SEEDED):
        assert texts(member.model, params, max_batch=1) == member.plain(params)


def test_bf16_is_close_to_fp32(member):
    exact = leaf_logits(member.network, text(20))
    rounded = leaf_logits(copy.deepcopy(member.network).bfloat16(), text(20))
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).abs().max() < 0.1 * exact.abs().max()


def test_a_folder_loads_with_the_fastest_runner_that_carries_it(member, tmp_path):
    member.network.save_pretrained(tmp_path)
    model = load_model(tmp_path, device="cpu", max_batch=4, max_context=tiny.MAX_CONTEXT)
    carried = ("native",) if member.family in tiny.NATIVE else ("native", "graphs")
    if member.family not in tiny.LEAN + tiny.NATIVE:
        carried = ()
    assert isinstance(model, NativeModel if carried else HuggingFaceModel)
    assert model.num_parameters == member.model.num_parameters
    assert texts(model, GREEDY) == member.expected
    for runner in {"native", "graphs"} - {*carried}:
        with pytest.raises(RunnerUnavailable, match=r"runner (supports|does not support)"):
            load_model(tmp_path, device="cpu", runner=runner)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("change", [None, -1, 1], ids=["ignored", "too short", "too long"])
@pytest.mark.parametrize("family", tiny.SLIDING)
def test_a_window_not_kept_to_is_noticed(family, change, monkeypatch):
    """The tests above can fail: without the window, and with one that is off by one."""
    network = tiny.network(family)
    blocks = AttentionPass.blocks
    monkeypatch.setattr(
        AttentionPass,
        "blocks",
        lambda self, window: blocks(self, change and window and window + change),
    )
    assert texts(tiny.adapted(network), GREEDY) != by_transformers(network)


@pytest.mark.parametrize("family", tiny.SLIDING)
def test_a_window_counts_positions_and_not_places(family, monkeypatch):
    """Nodes of a tree lie further from the committed text in the store than in the text."""
    network = tiny.network(family)
    ids = text(20)
    leaf = len(BRANCHED_TOKENS) - 1
    path = [BRANCHED_TOKENS[node] for node in BRANCHED.path(leaf)]
    expected = network(torch.tensor([[*ids, *path]])).logits[0, -1]

    torch.testing.assert_close(leaf_logits(network, ids), expected, atol=1e-3, rtol=1e-3)
    monkeypatch.setattr(attention, "list_positions", lambda num_rows, _: torch.arange(num_rows))
    assert (leaf_logits(network, ids) - expected).abs().max() > 0.05


def leaf_logits(network: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """Of the last node of a tree behind `ids`."""
    model = tiny.adapted(network)
    context = Context(model.store, list(ids))
    feed(model, context, len(ids) - 1)
    span = context.span(1, BRANCHED)
    return score(model, [(span, [ids[-1], *BRANCHED_TOKENS])])[-1]
