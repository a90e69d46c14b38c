"""Splits, shuffles, mixes and packed rows of any samples."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.align.samples import Packing, Sample, cut, is_held_out, mix, prompt_hash, shuffle

TOKENS = st.lists(st.integers(0, 1000), min_size=1, max_size=9)
SHARES = st.floats(0.0, 1.0, exclude_max=True)
LENGTHS = st.integers(2, 40)
# Where a text begins, its length, where spans begin and end, and who wrote it. Samples are made in
# the tests: the type checks that run with them draw random numbers, which no strategy may.
TEXTS = st.tuples(
    st.integers(0, 10_000),
    LENGTHS,
    st.lists(st.integers(1, 40), unique=True, max_size=6),
    st.sampled_from(["target", "fixed"]),
)


def sample_of(text: tuple[int, int, list[int], str]) -> Sample:
    """A text some tokens of which are learned; no two tokens of it are the same."""
    start, length, bounds, source = text
    inside = sorted(bound for bound in bounds if bound <= length)
    spans = tuple(zip(inside[::2], inside[1::2], strict=False))
    return Sample(
        prompt_hash=f"{start:016x}",
        token_ids=tuple(range(start, start + length)),
        spans=spans or ((1, length),),
        source=source,
    )


@given(TOKENS, SHARES, SHARES)
def test_a_larger_share_holds_out_more(token_ids, one, other):
    prompt = prompt_hash(token_ids)
    low, high = sorted((one, other))
    assert is_held_out(prompt, low) <= is_held_out(prompt, high)
    assert is_held_out(prompt, low) == (Fraction(int(prompt, 16), 2**64) < Fraction(low))


@given(st.integers(1, 120), st.integers(-(2**70), 2**70))
def test_shuffling_loses_and_doubles_nothing(size, key):
    assert sorted(shuffle(size, key)) == list(range(size))


@given(TEXTS, st.integers(2, 30))
def test_what_is_cut_is_a_piece_with_its_learned_tokens(text, window):
    sample = sample_of(text)
    found = cut(sample, window)
    assert len(found.token_ids) <= window
    assert found.num_learned >= 1
    first = sample.token_ids.index(found.token_ids[0])
    assert found.token_ids == sample.token_ids[first : first + len(found.token_ids)]
    whole = {i for start, end in sample.spans for i in range(start, end)}
    kept = {i + first for start, end in found.spans for i in range(start, end)}
    # Whatever of the learned is there, behind the first token, which nothing predicts, is learned.
    assert kept == whole & set(range(first + 1, first + len(found.token_ids)))
    last = sample.spans[-1][1]
    if last - sample.spans[0][0] <= window - window // 2:
        assert kept == whole
    if last <= window:
        assert first == 0
        assert kept == whole


@settings(max_examples=50)
@given(st.lists(TEXTS, min_size=1, max_size=12), st.integers(2, 30), st.integers(0, 2**40))
def test_an_epoch_holds_every_sample_once_and_whole(texts, window, seed):
    packing = Packing([sample_of(text) for text in texts], window=window, seed=seed)
    batch = packing.batch(0, packing.rows_per_epoch)
    seen: list[int] = []
    labels: list[int] = []
    for row in range(packing.rows_per_epoch):
        places = batch.samples[row].tolist()
        for index in dict.fromkeys(places):
            start, count = places.index(index), places.count(index)
            assert places[start : start + count] == [index] * count  # never torn apart
            assert batch.positions[row, start : start + count].tolist() == list(range(count))
            if index == -1:
                assert start + count == window
                assert not batch.predicts[row, start:].any()
                continue
            sample = packing.samples[index]
            seen.append(index)
            assert tuple(batch.ids[row, start : start + count].tolist()) == sample.token_ids
            learned = {i for a, b in sample.spans for i in range(a, b)}
            predicted = batch.predicts[row, start : start + count].nonzero()[:, 0] + 1
            assert set(predicted.tolist()) == learned
            labels += [sample.token_ids[i] for i in sorted(learned)]
    assert sorted(seen) == list(range(len(packing.samples)))
    assert batch.labels.tolist() == labels


@settings(max_examples=50)
@given(st.lists(TEXTS, min_size=1, max_size=40), st.integers(2, 40))
def test_no_two_rows_would_fit_into_one(texts, window):
    packing = Packing([sample_of(text) for text in texts], window=window, seed=0)
    filled = (packing.batch(0, packing.rows_per_epoch).samples >= 0).sum(1).sort().values
    if len(filled) > 1:
        assert filled[0] + filled[1] > window


@given(
    st.lists(TEXTS, min_size=1, max_size=40),
    st.integers(0, 100),
    st.lists(st.integers(1, 20), min_size=3, max_size=3),
)
def test_shares_are_met_to_within_a_sample(drawn, seed, weights):
    texts = [sample_of(text) for text in drawn]
    present = {text.source: 0 for text in texts}
    parts = dict(zip(present, weights, strict=False))
    shares = {source: part / sum(parts.values()) for source, part in parts.items()}
    chosen = mix(texts, shares, seed=seed)
    learned = {s: sum(t.num_learned for t in chosen if t.source == s) for s in shares}
    available = {s: sum(t.num_learned for t in texts if t.source == s) for s in shares}
    longest = max(text.num_learned for text in texts)
    num_all = min(available[source] / shares[source] for source in shares)
    for source, share in shares.items():
        assert share * num_all - 1 <= learned[source] < share * num_all + longest
        assert learned[source] <= available[source]  # none twice
