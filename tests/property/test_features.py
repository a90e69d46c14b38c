"""Features kept beside the KV equal those of a pass over the whole text, whatever came before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests import tiny
from tests.natives import native_model
from tests.tabular import TabularModel
from torch import Tensor

from forerun.models.base import Context, LanguageModel, Span, pack
from forerun.models.kv_store import MIN_SHARED_TOKENS
from forerun.theory.tree import TokenTree

NUM_SLOTS = 3
MAX_CONTEXT = 60
VOCAB_SIZE = 7
LAYERS = (0, 2, 1)
TREES = (TokenTree.chain(3), TokenTree((-1, -1, 0, 0, 1, 3)), TokenTree((-1, 0, -1, 2)))
BEGINNINGS = ([1] * 24, [2, 3] * 12, [2, 3] * 9 + [4] * 6)


@dataclass
class Live:
    """A sequence that has a slot."""

    context: Context
    scope: str


def tabular() -> LanguageModel:
    return TabularModel.from_seed(
        1, vocab_size=VOCAB_SIZE, num_slots=NUM_SLOTS, max_context=MAX_CONTEXT
    )


@cache
def network() -> object:
    return tiny.network("qwen3", vocab_size=VOCAB_SIZE, max_context=MAX_CONTEXT)


def eager() -> LanguageModel:
    return tiny.adapted(network(), num_slots=NUM_SLOTS)


def native() -> LanguageModel:
    return native_model(network(), num_slots=NUM_SLOTS, max_context=MAX_CONTEXT)


class Features(RuleBasedStateMachine):
    """Sequences that join, grow by chains and tree paths, fork, are preempted and leave."""

    make: Callable[[], LanguageModel]

    def __init__(self) -> None:
        super().__init__()
        self.model = self.make()
        self.oracle = self.make()
        self.model.store.keep_features(LAYERS)
        self.live: list[Live] = []
        self.prefixes: list[tuple[object, list[int]]] = []
        self.known: dict[tuple[int, ...], Tensor] = {}

    def room(self) -> bool:
        return len(self.live) < NUM_SLOTS

    def pass_over(self, span: Span, tokens: list[int]) -> None:
        batch = pack([span], tokens, [0], self.model.device)
        output = self.model.forward(replace(batch, feature_layers=LAYERS))
        self.model.store.stage_features(span.slot, span.start, output.features)

    @precondition(lambda self: self.room())
    @rule(
        beginning=st.sampled_from(BEGINNINGS),
        part=st.integers(2, 24),
        rest=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=5),
        scope=st.sampled_from("ab"),
    )
    def join(self, beginning: list[int], part: int, rest: list[int], scope: str) -> None:
        ids = [*beginning[:part], *rest]
        self.live.append(Live(Context(self.model.store, ids, scope), scope))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), limit=st.integers(1, 30))
    def prefill(self, data: st.DataObject, limit: int) -> None:
        context = data.draw(st.sampled_from(self.live)).context
        tokens = context.pending(limit)
        if tokens:
            self.pass_over(context.span(len(tokens)), tokens)
            context.commit(range(len(tokens)))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tree=st.sampled_from(TREES), is_staged_twice=st.booleans())
    def verify(self, data: st.DataObject, tree: TokenTree, is_staged_twice: bool) -> None:
        context = data.draw(st.sampled_from(self.live)).context
        if context.num_pending == 0:
            context.ids.append(data.draw(st.integers(0, VOCAB_SIZE - 1)))
        pending = context.pending()
        num_nodes = len(tree.parents)
        if len(context.ids) + num_nodes > MAX_CONTEXT:
            return
        tokens = data.draw(st.lists(st.integers(0, 6), min_size=num_nodes, max_size=num_nodes))
        if is_staged_twice:
            self.pass_over(context.span(len(pending)), pending)
        self.pass_over(context.span(len(pending), tree), [*pending, *tokens])
        node = data.draw(st.integers(-1, num_nodes - 1))
        path = [] if node < 0 else list(tree.path(node))
        context.ids += [tokens[above] for above in path]
        context.commit([*range(len(pending)), *(len(pending) + above for above in path)])

    @precondition(lambda self: self.live and self.room())
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.live))
        ids = list(parent.context.ids[: parent.context.num_cached])
        copy = Context(self.model.store, [*ids, 5])
        self.model.store.free(copy.slot)
        copy.slot = self.model.store.fork(parent.context.slot)
        self.live.append(Live(copy, parent.scope))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        live = data.draw(st.sampled_from(self.live))
        live.context.close(data.draw(st.sampled_from([0, live.context.num_cached])))
        live.context = Context(self.model.store, live.context.ids, live.scope)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), is_kept=st.booleans())
    def leave(self, data: st.DataObject, is_kept: bool) -> None:
        live = data.draw(st.sampled_from(self.live))
        live.context.close(live.context.num_cached if is_kept else 0)
        self.live.remove(live)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def export(self, data: st.DataObject) -> None:
        context = data.draw(st.sampled_from(self.live)).context
        size = data.draw(st.integers(0, context.num_cached))
        prefix = self.model.store.export_prefix(context.slot, size)
        self.prefixes.append((prefix, context.ids[:size]))

    @precondition(lambda self: self.prefixes and self.room())
    @rule(data=st.data())
    def import_prefix(self, data: st.DataObject) -> None:
        prefix, ids = data.draw(st.sampled_from(self.prefixes))
        context = Context(self.model.store, [*ids, 6])
        self.model.store.import_prefix(context.slot, prefix)
        self.live.append(Live(context, "c"))

    @invariant()
    def every_committed_token_has_its_features(self) -> None:
        for live in self.live:
            length = live.context.num_cached
            found = self.model.store.features(live.context.slot, 0, length)
            assert found.shape == (length, len(LAYERS), self.model.hidden_size)
            if length:
                expected = self.recomputed(tuple(live.context.ids[:length]))
                torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)

    def recomputed(self, ids: tuple[int, ...]) -> Tensor:
        if ids not in self.known:
            context = Context(self.oracle.store, list(ids))
            batch = pack([context.span(len(ids))], list(ids), [0], self.oracle.device)
            self.known[ids] = self.oracle.forward(replace(batch, feature_layers=LAYERS)).features
            context.close()
        return self.known[ids]


class TabularFeatures(Features):
    make = staticmethod(tabular)


class EagerFeatures(Features):
    make = staticmethod(eager)


class NativeFeatures(Features):
    make = staticmethod(native)


TestTabularFeatures = TabularFeatures.TestCase
TestTabularFeatures.settings = settings(max_examples=60, stateful_step_count=30)
TestEagerFeatures = EagerFeatures.TestCase
TestEagerFeatures.settings = settings(max_examples=10, stateful_step_count=25)
TestNativeFeatures = NativeFeatures.TestCase
TestNativeFeatures.settings = settings(max_examples=15, stateful_step_count=30)


def test_a_prefix_hit_brings_its_features():
    model = tabular()
    model.store.keep_features(LAYERS)
    ids = [*BEGINNINGS[1], 5]
    first = Context(model.store, list(ids), "a")
    batch = replace(pack([first.span(len(ids))], ids, [0], model.device), feature_layers=LAYERS)
    features = model.forward(batch).features
    model.store.stage_features(first.slot, 0, features)
    first.commit(range(len(ids)))
    for _ in range(2):  # from a slot in use, then from one that was given back
        second = Context(model.store, [*ids[:20], 0, 0], "a")
        assert second.num_cached == 20 >= MIN_SHARED_TOKENS
        assert torch.equal(model.store.features(second.slot, 0, 20), features[:20])
        second.close()
        first.close(len(ids)) if model.store.num_free < NUM_SLOTS else None


def test_rows_without_features_are_not_committed():
    model = tabular()
    model.store.keep_features(LAYERS)
    context = Context(model.store, [1, 2, 3])
    model.forward(pack([context.span(3)], [1, 2, 3], [0], model.device))
    with pytest.raises(ValueError, match="committed without features"):
        context.commit(range(3))
    with pytest.raises(ValueError, match="3 rows are written, 0 have features"):
        model.store.stage_features(context.slot, 1, torch.zeros(1, 3, 4))
    with pytest.raises(ValueError, match="shape"):
        model.store.stage_features(context.slot, 0, torch.zeros(1, 2, 4))
    model.store.stage_features(context.slot, 0, torch.zeros(2, 3, 4))
    context.commit(range(2))
    with pytest.raises(ValueError, match="prefix of 3 tokens"):
        model.store.features(context.slot, 0, 3)


def test_keeping_features_needs_an_empty_store():
    model = tabular()
    context = Context(model.store, [1], "a")
    with pytest.raises(ValueError, match="reserved"):
        model.store.keep_features(LAYERS)
    with pytest.raises(ValueError, match="keeps no features"):
        model.store.features(context.slot, 0, 0)
    prefix = model.store.export_prefix(context.slot, 0)
    context.close()
    model.store.keep_features(LAYERS)
    with pytest.raises(ValueError, match="without features"):
        model.store.import_prefix(model.store.reserve(), prefix)


def test_rows_written_again_need_their_features_again():
    """Features of an earlier attempt at the same rows are not those of the rows."""
    model = tabular()
    model.store.keep_features(LAYERS)
    context = Context(model.store, [1, 2, 3])
    batch = pack([context.span(3)], [1, 2, 3], [0], model.device)
    output = model.forward(replace(batch, feature_layers=LAYERS))
    model.store.stage_features(context.slot, 0, output.features)
    model.forward(pack([context.span(2, num_staged=1)], [4, 5], [0], model.device))
    with pytest.raises(ValueError, match="committed without features"):
        context.commit(range(3))
    context.commit(range(1))


def test_rows_behind_others_without_features_do_not_make_up_for_them():
    """Features written in place need those of every row before them."""
    store = tabular().store
    store.keep_features(LAYERS)
    slot = store.reserve()
    store.claim(slot, 0, 2)
    with pytest.raises(ValueError, match="cannot be stored"):
        store.claim(slot, 2, 2, writes_features=True)
    with pytest.raises(ValueError, match="committed without features"):
        store.commit(slot, range(4))
