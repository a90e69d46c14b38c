"""Recorded passes on a CUDA device: what they compute, and that the host never waits in them."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from tests import tiny
from tests.recorders import Again, torch_model
from tests.system.test_engine_identity import answers
from torch import Tensor
from transformers import PreTrainedModel

from forerun.engine.engine import Engine
from forerun.models.base import Context, RowBatch, pack
from forerun.models.huggingface import adapt
from forerun.models.runner.graphs.model import TorchModel
from forerun.models.runner.graphs.programs import CudaRecorder
from forerun.sampling.config import SamplingParams
from forerun.theory.tree import NO_TREE, TokenTree

pytestmark = pytest.mark.usefixtures("unchecked")

TREE = TokenTree((-1, -1, 0, 0, 1, 3))


@pytest.fixture(autouse=True)
def exact_matmuls(cuda: torch.device) -> Iterator[None]:
    """fp32 means fp32: no shortened mantissas in matrix products."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def recorded(network: PreTrainedModel, device: torch.device) -> TorchModel:
    return torch_model(network, CudaRecorder(device), device=str(device))


def passes(model: TorchModel) -> Iterator[RowBatch]:
    """Prefill of two sequences, a tree over both, then one row each."""
    contexts = [Context(model.store, list(range(1, n))) for n in (7, 31)]
    for tree in (NO_TREE, TREE, NO_TREE):
        spans = [context.span(context.num_pending, tree) for context in contexts]
        ids = [[*context.pending(), *range(len(tree.parents))] for context in contexts]
        tokens = torch.tensor([token for part in ids for token in part])
        yield pack(spans, tokens, range(len(tokens)), model.device)
        for context, span in zip(contexts, spans, strict=True):
            context.commit(range(span.num_chain))
            context.ids.append(5)


@pytest.mark.parametrize("family", tiny.LEAN)
def test_texts_are_those_of_transformers(cuda, family):
    network = tiny.network(family)
    oracle = adapt(tiny.network(family).to(cuda), num_slots=4, max_context=tiny.MAX_CONTEXT)
    expected = answers(tiny.engine_over(oracle))
    target = recorded(network, cuda)
    assert answers(tiny.engine_over(target)) == expected
    for draft in (network, tiny.network(family, jitter=0.02)):
        drafter = tiny.drafting(recorded(draft, cuda))
        assert answers(tiny.engine_over(target, drafter, k=4)) == expected
    assert target.programs is not None
    assert len(target.programs._programs) > 3


@pytest.mark.parametrize("family", tiny.LEAN)
def test_a_replay_is_the_pass_itself(cuda, family):
    network = tiny.network(family)
    ours, again = recorded(network, cuda), torch_model(network, Again(), device=str(cuda))
    for batch, other in zip(passes(ours), passes(again), strict=True):
        ours.forward(batch)
        assert torch.equal(ours.forward(batch).logits, again.forward(other).logits)


def test_no_pass_waits_for_the_device(cuda):
    model = recorded(tiny.network(), cuda)
    context = Context(model.store, [1, 2, 3])
    tokens = torch.tensor(context.ids, device=cuda)
    batch = pack([context.span(3)], tokens, [2], cuda)
    expected = model.forward(batch).logits, model.greedy_chain(batch, 4, tiny.VOCAB_SIZE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = model.forward(batch).logits, model.greedy_chain(batch, 4, tiny.VOCAB_SIZE)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(result, other)


def greedy_texts(engine: Engine) -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    return [output.token_ids for output in engine.generate(list(tiny.PROMPTS), params)]


def test_bf16_texts_part_only_at_near_ties(cuda):
    """Where plain and speculative text part, the two tokens lie within what rounding moves them."""
    target_network, draft_network = (
        tiny.network(hidden_size=64, jitter=jitter).to(torch.bfloat16) for jitter in (0, 0.02)
    )
    target = recorded(target_network, cuda)
    drafter = tiny.drafting(recorded(draft_network, cuda))
    plain = greedy_texts(tiny.engine_over(target))
    drafted = greedy_texts(tiny.engine_over(target, drafter, k=4))
    for prompt, first, second in zip(tiny.PROMPTS, plain, drafted, strict=True):
        pairs = list(zip(first, second, strict=True))
        parting = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
        if parting is not None:
            ids = [*tiny.tokenizer().encode(prompt), *first[:parting]]
            rounded, exact = (
                logits_after(target_network, ids),
                logits_after(copy.deepcopy(target_network).float(), ids),
            )
            moved = (rounded - exact).abs().max()
            assert abs(exact[first[parting]] - exact[second[parting]]) <= 2 * moved


def logits_after(network: PreTrainedModel, ids: list[int]) -> Tensor:
    return network(torch.tensor([ids])).logits[0, -1].float()


def test_out_of_memory_in_a_recording_leaves_the_next_pass_whole(cuda):
    """The planted failure comes inside the capture, as the allocator's would."""

    class Failing(CudaRecorder):
        def record(self, run):
            calls = iter((False, True))

            def fail_in_capture():
                result = run()
                if next(calls):
                    raise torch.OutOfMemoryError("planted")
                return result

            return super().record(fail_in_capture)

    network = tiny.network()
    models = [
        torch_model(network, recorder, device=str(cuda)) for recorder in (Failing(cuda), Again())
    ]
    for ours, theirs in zip(*(passes(model) for model in models), strict=True):
        torch.testing.assert_close(models[0].forward(ours).logits, models[1].forward(theirs).logits)
