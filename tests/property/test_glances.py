"""Requests that probe, draft, decode plainly and go, at random: what probes say and leave."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.drafters.test_draft_model import GREEDY, SAMPLED, asked, plan
from tests.unit.drafters.test_glance import NEVER, Watched, watched

from forerun.drafters.draft_model import DraftModel
from forerun.drafters.glance import CLOSE_LOOK, GLANCE, LEAST_SEEN, SAMPLED_GLANCE, UNASKED
from forerun.sampling.proposal import Proposal, TokenSource, Verdict

pytestmark = pytest.mark.usefixtures("unchecked")

NAMES = {"a": GREEDY, "b": GREEDY, "c": SAMPLED}
PROMPT = [(5 * at * at + at) % 8 for at in range(60)]
LONGEST = GLANCE - GLANCE // UNASKED - 1
"""Tokens that, with a bonus token before them, a glance looks back at."""

names = st.sampled_from([*NAMES])
writes = st.tuples(
    st.just("write"), names, st.sampled_from("own near none".split()), st.integers(1, 60)
)
proposals = st.tuples(
    st.just("propose"),
    st.dictionaries(names, st.tuples(st.integers(1, 3), st.booleans()), min_size=1),
    st.sampled_from([None, 0, 1, 2, 3]),
    st.integers(0, 7),
)
forgets = st.tuples(st.just("forget"), names)


class Traffic:
    """Texts of some requests, and what is known of every token of theirs.

    Args:
        num_prompt: tokens the texts begin with, and share.
    """

    def __init__(self, num_prompt: int) -> None:
        self.model: Watched = watched(len(NAMES))
        self.drafter = DraftModel(self.model, 8)
        self.requests = {
            name: replace(asked(PROMPT[:num_prompt], params, name=name), scope="")
            for name, params in NAMES.items()
        }
        self.known: dict[str, set[int]] = {name: set() for name in NAMES}
        self.live: set[str] = set()

    def write(self, name: str, kind: str, num_tokens: int) -> None:
        """Tokens that the draft proposes having read all, or having read a little, or never."""
        ids = self.requests[name].ids
        start = ids[-6:]
        for _ in range(num_tokens):
            token = NEVER if kind == "none" else self.model.best(ids if kind == "own" else start)
            ids.append(token)
            start.append(token)

    def propose(
        self, wanted: dict[str, tuple[int, bool]], num_accepted: int | None, final: int
    ) -> None:
        """Ask, check what is said, and tell what came of it, unless nothing did."""
        requests = [self.requests[name] for name in wanted]
        plans = [plan(k, probe=probe) for k, probe in wanted.values()]
        found = self.drafter.propose(requests, plans)
        self.live |= wanted.keys()
        for (name, (k, probe)), proposal in zip(wanted.items(), found, strict=True):
            assert proposal is not None
            assert proposal.num_drafted == k
            reads = self.reads(name, k) if len(wanted) == 1 else self.possible_reads(name)
            assert any(self.is_right(name, proposal, read) for read in reads)
            if not probe:
                assert proposal.hindsight is None
                assert self.is_right(name, proposal, self.requests[name].ids)
            self.note(name, proposal)
        if num_accepted is not None:
            for name, proposal in zip(wanted, found, strict=True):
                self.tell(name, proposal.tokens.tolist(), num_accepted, final)

    def possible_reads(self, name: str) -> list[list[int]]:
        ids = self.requests[name].ids
        if NAMES[name] is SAMPLED:
            return [ids, ids[-SAMPLED_GLANCE:]]
        return [ids, ids[-GLANCE:], ids[-CLOSE_LOOK:]]

    def reads(self, name: str, k: int) -> list[list[int]]:
        """The very tokens that the last pass saw, but for those drafted."""
        (seen,) = self.model.read
        read = seen[: len(seen) - (k - 1)]
        assert read in self.possible_reads(name)
        return [read]

    def is_right(self, name: str, proposal: Proposal, read: list[int]) -> bool:
        """Whether it is what a draft says that has read this."""
        tokens = proposal.tokens.tolist()
        if NAMES[name] is SAMPLED:
            assert proposal.hindsight is None
            laws = [self.model.probs([*read, *tokens[:node]]) for node in range(len(tokens))]
            return bool(torch.allclose(proposal.draft_probs, torch.stack(laws).float()))
        hindsight = proposal.hindsight or ()
        says = self.model.would(read, len(hindsight)) if len(hindsight) < len(read) else None
        return tokens == self.model.chain(read, len(tokens)) and hindsight == says

    def note(self, name: str, proposal: Proposal) -> None:
        """Nothing is said twice, and nothing of the prompt."""
        if proposal.hindsight is None:
            return
        length = len(self.requests[name].ids)
        places = set(range(length - len(proposal.hindsight), length))
        assert places
        assert min(places) >= self.requests[name].num_prompt
        assert not places & self.known[name]
        self.known[name] |= places

    def tell(self, name: str, tokens: list[int], num_accepted: int, final: int) -> None:
        """A verdict; of a bonus token it does not say whether it would have been proposed."""
        accepted = tokens[:num_accepted]
        is_bonus = len(accepted) == len(tokens)
        last = TokenSource.BONUS if is_bonus else TokenSource.RECOVERED
        verdict = Verdict(
            path=tuple(range(len(accepted))),
            tokens=(*accepted, final),
            sources=(*[TokenSource.ACCEPTED] * len(accepted), last),
            expected_accepted=0.0,
        )
        ids = self.requests[name].ids
        first = len(ids)
        ids.extend(verdict.tokens)
        self.known[name] |= set(range(first, len(ids) - is_bonus))
        self.drafter.observe([tiny.outcome(self.requests[name], verdict)])

    def forget(self, name: str) -> None:
        """It goes; another of its name begins anew with the same text."""
        self.drafter.forget(name)
        self.live.discard(name)
        self.known[name] = set()


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, len(PROMPT)),
    st.lists(writes | proposals | proposals | forgets, min_size=4, max_size=24),
)
def test_probes_say_what_is_so_once_and_leave_room(num_prompt, happenings):
    traffic = Traffic(num_prompt)
    num_free = traffic.model.store.num_free
    for what, *parts in happenings:
        if what == "propose" and any(len(traffic.requests[name].ids) > 600 for name in parts[0]):
            continue
        getattr(traffic, what)(*parts)
        assert traffic.model.store.num_free >= num_free - len(traffic.live)
    for name in NAMES:
        traffic.forget(name)
    assert traffic.model.store.num_free == num_free


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([120, 200, CLOSE_LOOK + 1]),
    st.lists(
        st.tuples(
            st.sampled_from(["own", "near", "none"]),
            st.integers(LEAST_SEEN, LONGEST),
            st.integers(1, 3),
            st.sampled_from([None, 0, 1, 3]),
        ),
        min_size=2,
        max_size=10,
    ),
)
def test_of_texts_that_a_glance_holds_all_is_said(num_ids, texts):
    """From the first glance on, by a probe or by a verdict, whatever more is read."""
    traffic = Traffic(len(PROMPT))
    traffic.write("a", "near", num_ids - len(PROMPT))
    for kind, num_tokens, k, num_accepted in texts:
        traffic.propose({"a": (k, True)}, None, 0)
        known, length = traffic.known["a"], len(traffic.requests["a"].ids)
        assert known == set(range(min(known), length))
        if num_accepted is not None:
            traffic.propose({"a": (k, True)}, num_accepted, 1)
        traffic.write("a", kind, num_tokens)
