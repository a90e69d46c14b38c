"""What every LanguageModel owes its callers, whatever shape the passes take."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from tests.tabular import TabularModel, TokenStore
from torch import Tensor

from forerun.models.base import Context, LanguageModel, Span, pack
from forerun.models.kv_store import KVStore
from forerun.theory.tree import TokenTree

VOCAB_SIZE = 61
BRANCHED = TokenTree((-1, -1, 0, 0, 1, 3, 5, 4))
BRANCHED_TOKENS = [7, 8, 9, 10, 11, 12, 13, 14]


def text(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()


def score(
    model: LanguageModel,
    parts: Sequence[tuple[Span, Sequence[int]]],
    wanted: Sequence[int] | None = None,
) -> Tensor:
    """Logits of the wanted rows (None: all) of one pass over spans and their tokens."""
    tokens = torch.tensor([token for _, part in parts for token in part])
    rows = range(len(tokens)) if wanted is None else wanted
    return model.forward(pack([span for span, _ in parts], tokens, rows, model.device)).logits


def feed(model: LanguageModel, context: Context, num_tokens: int | None = None) -> Tensor:
    """Feed and commit pending tokens; their logits."""
    tokens = context.pending(num_tokens)
    logits = score(model, [(context.span(len(tokens)), tokens)])
    context.commit(range(len(tokens)))
    return logits


def mixed_pass(
    model: LanguageModel,
) -> tuple[list[Context], list[tuple[Span, list[int]]]]:
    """A prefilling, a verifying and a decoding sequence, and the parts of a pass over all three."""
    prefilling, verifying, decoding = contexts = [
        Context(model.store, text(length, length)) for length in (80, 30, 17)
    ]
    feed(model, prefilling, 5)
    feed(model, verifying, 29)
    feed(model, decoding, 16)
    parts = [
        (verifying.span(1, BRANCHED), [*verifying.pending(), *BRANCHED_TOKENS]),
        (prefilling.span(70), prefilling.pending(70)),
        (decoding.span(1), decoding.pending()),
    ]
    return contexts, parts


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_is_a_language_model_over_a_kv_store(case):
    assert isinstance(case.model, LanguageModel)
    assert isinstance(case.model.store, KVStore)
    assert case.model.vocab_size == VOCAB_SIZE
    assert case.model.max_context == 300


def test_the_expected_logits_are_worth_comparing(case):
    """Logits that hardly depend on the text would let every test below pass."""
    expected = case.expected(text(40))
    assert expected.std(dim=0).min() > 0.1


def test_ragged_pass_equals_every_sequence_alone(case):
    texts = [text(5, 1), text(1, 2), text(150, 3), text(64, 4)]
    contexts = [Context(case.model.store, ids) for ids in texts]
    logits = score(case.model, [(c.span(len(c.ids)), c.ids) for c in contexts])
    assert_close(logits, torch.cat([case.expected(ids) for ids in texts]))


@pytest.mark.covering
@pytest.mark.parametrize("chunk", [1, 7, 64, 65, 100])
def test_chunked_prefill_equals_one_prefill(case, chunk):
    ids = text(100 if chunk > 1 else 9)
    context = Context(case.model.store, ids)
    logits = [feed(case.model, context, chunk) for _ in range(0, len(ids), chunk)]
    assert context.num_pending == 0
    assert_close(torch.cat(logits), case.expected(ids))


@pytest.mark.covering
@pytest.mark.parametrize("num_prefix", [0, 3, 90])
@pytest.mark.parametrize("num_chain", [1, 3, 70])
def test_tree_node_equals_its_path_as_a_chain(case, num_prefix, num_chain):
    ids = text(num_prefix + num_chain)
    context = Context(case.model.store, ids)
    if num_prefix:
        feed(case.model, context, num_prefix)
    span = context.span(num_chain, BRANCHED)
    logits = score(case.model, [(span, [*context.pending(), *BRANCHED_TOKENS])])
    assert_close(logits[:num_chain], case.expected(ids)[num_prefix:])
    for node in range(len(BRANCHED_TOKENS)):
        path = [BRANCHED_TOKENS[above] for above in BRANCHED.path(node)]
        assert_close(logits[num_chain + node], case.expected([*ids, *path])[-1])


def test_chain_drafted_as_a_tree_equals_a_chain(case):
    ids, draft = text(20), text(9, 1)
    context = Context(case.model.store, ids)
    feed(case.model, context, 19)
    span = context.span(1, TokenTree.chain(len(draft)))
    logits = score(case.model, [(span, [ids[-1], *draft])])
    assert_close(logits, case.expected([*ids, *draft])[19:])


@pytest.mark.covering
@pytest.mark.parametrize("leaf", range(-1, len(BRANCHED_TOKENS)))
def test_committed_path_is_as_if_fed_as_a_chain(case, leaf):
    ids = text(12)
    context = Context(case.model.store, ids)
    feed(case.model, context, 10)
    score(case.model, [(context.span(2, BRANCHED), [*context.pending(), *BRANCHED_TOKENS])])
    path = BRANCHED.path(leaf)
    ids += [BRANCHED_TOKENS[node] for node in path]
    context.commit([0, 1, *(2 + node for node in path)])
    assert context.num_pending == 0

    fed = Context(case.model.store, list(ids))
    feed(case.model, fed)
    for ours, theirs in zip(prefix_of(context), prefix_of(fed), strict=True):
        assert_close(ours, theirs)
    ids += text(3, 5)
    assert_close(feed(case.model, context), case.expected(ids)[-3:])


def prefix_of(context: Context) -> tuple[Tensor, ...]:
    return context.store.export_prefix(context.slot, context.num_cached).tensors


def test_prefill_chunk_verification_and_decoding_share_a_pass(case):
    (prefilling, verifying, decoding), parts = mixed_pass(case.model)
    logits = score(case.model, parts)
    assert_close(logits[0], case.expected(verifying.ids)[-1])
    assert_close(logits[8], case.expected([*verifying.ids, 8, 11, 14])[-1])
    assert_close(logits[9:79], case.expected(prefilling.ids)[5:75])
    assert_close(logits[79], case.expected(decoding.ids)[-1])


def test_rows_staged_one_at_a_time_are_seen_before_they_are_committed(case):
    ids, drafted = text(6), text(4, 1)
    context = Context(case.model.store, ids)
    feed(case.model, context, 5)
    rows = [ids[-1], *drafted]
    logits = [
        score(case.model, [(context.span(1, num_staged=staged), [token])])
        for staged, token in enumerate(rows)
    ]
    assert_close(torch.cat(logits), case.expected([*ids, *drafted])[5:])
    context.commit(range(3))
    ids += [*drafted[:2], 42]
    assert_close(feed(case.model, context), case.expected(ids)[-1:])


def test_rows_staged_again_replace_the_first_attempt(case):
    ids = text(6)
    context = Context(case.model.store, ids)
    feed(case.model, context, 5)
    score(case.model, [(context.span(1, TokenTree.chain(3)), [ids[-1], 1, 2, 3])])
    logits = score(case.model, [(context.span(1, TokenTree.chain(2)), [ids[-1], 4, 5])])
    assert_close(logits, case.expected([*ids, 4, 5])[5:])


def test_logits_come_for_the_rows_asked_in_that_order(case):
    first, second = Context(case.model.store, text(4, 1)), Context(case.model.store, text(5, 2))
    parts = [(first.span(4), first.ids), (second.span(5), second.ids)]
    logits = score(case.model, parts, wanted=[8, 0, 3])
    expected = torch.cat([case.expected(first.ids), case.expected(second.ids)])
    assert_close(logits, expected[[8, 0, 3]])


def test_no_rows_asked_still_stages(case):
    ids = text(8)
    context = Context(case.model.store, ids)
    logits = score(case.model, [(context.span(7), ids[:7])], wanted=[])
    assert logits.shape == (0, VOCAB_SIZE)
    context.commit(range(7))
    assert_close(feed(case.model, context), case.expected(ids)[-1:])


def test_fork_continues_on_its_own(case):
    ids = text(10)
    context = Context(case.model.store, ids)
    feed(case.model, context)
    other = Context(case.model.store, [*ids, 3])
    case.model.store.free(other.slot)
    other.slot = case.model.store.fork(context.slot)
    ids.append(4)
    assert_close(feed(case.model, other), case.expected(other.ids)[-1:])
    assert_close(feed(case.model, context), case.expected(ids)[-1:])


def test_imported_prefix_is_as_if_fed(case):
    ids = text(10)
    context = Context(case.model.store, ids)
    feed(case.model, context)
    prefix = case.model.store.export_prefix(context.slot, 6)
    context.close()
    other = Context(case.model.store, [*ids[:6], 1, 2])
    case.model.store.import_prefix(other.slot, prefix)
    assert_close(feed(case.model, other), case.expected(other.ids)[-2:])


def test_slot_given_back_leaves_nothing_behind(case):
    longer = Context(case.model.store, text(50, 1))
    feed(case.model, longer)
    longer.close()
    ids = text(5, 2)
    assert_close(feed(case.model, Context(case.model.store, ids)), case.expected(ids))


@pytest.mark.covering
@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 40, VOCAB_SIZE + 3])
def test_greedy_chain_is_decoding_token_by_token(case, num_tokens, vocab_size):
    texts = [text(5, 1), text(1, 2), text(70, 3)]
    contexts = [Context(case.model.store, ids) for ids in texts]
    feed(case.model, contexts[0], 3)
    drafted = greedy_chain(case.model, contexts, num_tokens, vocab_size)
    assert drafted.shape == (3, num_tokens) and drafted.dtype == torch.int64
    for ids, tokens in zip(texts, drafted.tolist(), strict=True):
        for depth, token in enumerate(tokens):
            row = case.expected([*ids, *tokens[:depth]])[-1][:vocab_size]
            assert token == int(row.argmax())


def test_greedy_chain_stages_what_it_feeds(case):
    ids = text(6)
    context = Context(case.model.store, ids)
    feed(case.model, context, 4)
    (tokens,) = greedy_chain(case.model, [context], 4, VOCAB_SIZE).tolist()
    with pytest.raises(ValueError, match="not among its 5 staged"):
        context.commit(range(6))
    context.commit(range(4))  # two pending, two drafted
    ids += [*tokens[:2], 42]
    assert_close(feed(case.model, context), case.expected(ids)[-1:])


def test_greedy_chain_takes_the_lowest_id_of_equals():
    log_probs = torch.tensor([[0.2, 0.4, 0.4]], dtype=torch.float64).log().expand(4, 3)
    model = TabularModel(log_probs=log_probs, order=1, store=TokenStore(1, 20, 4))
    context = Context(model.store, [0])
    assert greedy_chain(model, [context], 3, 3).tolist() == [[1, 1, 1]]


def greedy_chain(
    model: LanguageModel, contexts: Sequence[Context], num_tokens: int, vocab_size: int
) -> Tensor:
    spans = [context.span(context.num_pending) for context in contexts]
    tokens = torch.tensor([token for context in contexts for token in context.pending()])
    ends = list(accumulate(span.num_rows for span in spans))
    batch = pack(spans, tokens, [end - 1 for end in ends], model.device)
    return model.greedy_chain(batch, num_tokens, vocab_size)
