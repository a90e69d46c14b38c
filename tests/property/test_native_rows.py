"""On the native runner a row's logits are those of plain decoding, bit for bit.

Random passes (prompts in chunks, several sequences, trees, commits of random paths) against the
same text fed one token at a time in passes of one row. Whatever has not been written is NaN, and
some drafts hold a token whose embedding is NaN: neither may reach a row that does not see it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import tiny
from tests.natives import decoder_of, random_parameters, run_by_torch, run_natively
from torch import Tensor

from forerun.models.base import Context, LanguageModel, chain_by_forward, pack
from forerun.models.decoder import Decoder, Experts
from forerun.models.families import FAMILIES
from forerun.models.runner.native import NativeModel
from forerun.theory.tree import TokenTree

pytestmark = pytest.mark.usefixtures("unchecked")

# Sizes at the edges of tiles, panels, blocks and half vectors.
DECODERS: dict[str, Decoder] = {
    "smallest": decoder_of(
        hidden_size=16,
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=1,
        vocab_size=3,
        num_layers=1,
    ),
    "odd": decoder_of(
        hidden_size=48,
        num_heads=3,
        num_kv_heads=1,
        head_dim=48,
        intermediate_size=33,
        vocab_size=65,
        qkv_bias=True,
    ),
    "deep sums": decoder_of(  # more inner words than a block holds, in bf16 too
        hidden_size=64,
        num_heads=8,
        num_kv_heads=1,
        head_dim=80,
        intermediate_size=2100,
        vocab_size=130,
    ),
    "wide heads": decoder_of(
        hidden_size=32,
        num_heads=2,
        num_kv_heads=2,
        head_dim=256,
        intermediate_size=64,
        vocab_size=64,
        qk_norm=True,
    ),
    "many heads": decoder_of(  # more that share a key than are computed together
        hidden_size=80,
        num_heads=16,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=96,
        vocab_size=200,
        qk_norm=True,
        qkv_bias=True,
    ),
    "usual": decoder_of(
        hidden_size=128,
        num_heads=6,
        num_kv_heads=2,
        head_dim=128,
        intermediate_size=320,
        vocab_size=128,
        tied=True,
    ),
}
PLAIN = tuple(DECODERS)
NARROW = {"num_heads": 3, "num_kv_heads": 1, "head_dim": 48, "vocab_size": 65}
DECODERS |= {
    "windows and caps": replace(
        decoder_of(hidden_size=48, intermediate_size=33, **NARROW),
        variant=replace(FAMILIES["Gemma2ForCausalLM"].variant, qk_norm="whole", interleaved=True),
        windows=(7, None),
        rotations=(1, 0),
        inv_freq=0.3 ** torch.arange(5.0),
        sliding_rotation=(0.7 ** torch.arange(5.0), 1.5),
        gelu=True,
        embedding_scale=0.3,
        residual_scale=0.7,
        score_scale=0.4,
        score_cap=2.0,
        logit_divisor=1.5,
        logit_cap=3.0,
    ),
    "experts": replace(
        decoder_of(hidden_size=48, intermediate_size=33, num_layers=3, **NARROW),
        variant=FAMILIES["Qwen3MoeForCausalLM"].variant,
        windows=(None, 13, 1),
        rotations=(0, -1, 0),
        experts=Experts(
            num_experts=19,
            num_used=3,
            intermediate_size=70,
            normalised=True,
            layers=(True, False, True),
        ),
    ),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
QUANTISED = {"int8 bf16": ("bf16", "int8"), "int4 fp32": ("fp32", "int4-int8")}
"""Dtype and weights."""
NAN_TOKEN = 0


@dataclass(frozen=True)
class Feed:
    """What a sequence feeds in a pass, and which path of it is kept afterwards (-1: the chain)."""

    num_chain: int
    parents: tuple[int, ...]
    leaf: int


@st.composite
def feeds(draw: st.DrawFn) -> Feed:
    num_nodes = draw(st.sampled_from([0, 0, 1, 3, 7, 17]))
    return Feed(
        num_chain=draw(st.sampled_from([1, 1, 1, 2, 5, 12, 13, 40])),
        parents=tuple(draw(st.integers(-1, node - 1)) for node in range(num_nodes)),
        leaf=draw(st.integers(-1, num_nodes - 1)),
    )


@cache
def models(name: str, dtype: str, num_threads: int) -> tuple[NativeModel, NativeModel]:
    """The subject, and another of the same weights that decodes plainly on one thread."""
    decoder = DECODERS[name]
    parameters = random_parameters(decoder)
    if not decoder.tied:
        parameters["model.embed_tokens.weight"][NAN_TOKEN] = float("nan")
    dtype, weights = QUANTISED.get(dtype, (dtype, "auto"))
    options = {"dtype": DTYPES[dtype], "weights": weights}
    return (
        run_natively(decoder, parameters, num_threads=num_threads, **options),
        run_natively(decoder, parameters, **options),
    )


def tokens_from(generator: torch.Generator, num_tokens: int, first: int, end: int) -> list[int]:
    drawn = torch.empty(num_tokens, dtype=torch.int64)
    return drawn.random_(first, end, generator=generator).tolist()


class Sequence:
    """One text in two models, and what comes of it in each."""

    def __init__(self, subject: NativeModel, plain: NativeModel, seed: int, ill: bool) -> None:
        self.plain = plain
        self.first_token = NAN_TOKEN if ill else 1
        self.context = Context(subject.store, [])
        self.alone = Context(plain.store, [])
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, num_tokens: int, first: int) -> list[int]:
        return tokens_from(self.generator, num_tokens, first, self.plain.vocab_size)

    def one_row(self, token: int, num_staged: int = 0) -> Tensor:
        span = self.alone.span(1, num_staged=num_staged)
        batch = pack([span], torch.tensor([token]), [0], self.plain.device)
        return self.plain.forward(batch).logits[0]

    def decode(self, tokens: list[int]) -> list[Tensor]:
        """Plain decoding: a pass and a commit per token."""
        rows = []
        for token in tokens:
            rows.append(self.one_row(token))
            self.alone.commit([0])
        return rows

    def score_tree(self, tree: TokenTree, tokens: list[int]) -> list[Tensor]:
        """Every node at the end of its path, fed one by one."""
        return [
            [self.one_row(tokens[above], depth) for depth, above in enumerate(tree.path(node))][-1]
            for node in range(len(tokens))
        ]


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """The same bits; of NaN there are many, and which one comes is not promised."""
    ill = expected.isnan().any(dim=1)
    assert actual[ill].isnan().all()
    assert torch.equal(actual[~ill].view(torch.int32), expected[~ill].view(torch.int32))


def pass_over(subject: NativeModel, sequences: list[Sequence], fed: list[Feed]) -> None:
    """One pass of the subject, held to plain decoding row by row; then the paths are kept."""
    trees = [TokenTree(feed.parents) for feed in fed]
    chains = [s.draw(f.num_chain, s.first_token) for s, f in zip(sequences, fed, strict=True)]
    nodes = [s.draw(len(f.parents), 0) for s, f in zip(sequences, fed, strict=True)]
    spans = [
        sequence.context.span(len(chain), tree)
        for sequence, chain, tree in zip(sequences, chains, trees, strict=True)
    ]
    tokens = [t for chain, ids in zip(chains, nodes, strict=True) for t in [*chain, *ids]]
    batch = pack(spans, torch.tensor(tokens), range(len(tokens)), subject.device)
    logits = subject.forward(batch).logits
    expected = [
        row
        for sequence, chain, tree, ids in zip(sequences, chains, trees, nodes, strict=True)
        for row in [*sequence.decode(chain), *sequence.score_tree(tree, ids)]
    ]
    assert_same(logits, torch.stack(expected))
    for sequence, feed, tree, ids in zip(sequences, fed, trees, nodes, strict=True):
        path = tree.path(feed.leaf)
        if NAN_TOKEN in [ids[node] for node in path]:
            path = ()
        sequence.context.commit([*range(feed.num_chain), *(feed.num_chain + n for n in path)])
        sequence.decode([ids[node] for node in path])


SUBJECTS = [
    (name, dtype, num_threads)
    for index, name in enumerate(DECODERS)
    for dtype in (*DTYPES, *QUANTISED)
    for num_threads in (1, 2 + index % 2)
]


@pytest.mark.covering(2)
@pytest.mark.parametrize(("name", "dtype", "num_threads"), SUBJECTS)
@settings(max_examples=12)
@given(
    passes=st.lists(st.lists(feeds(), min_size=4, max_size=4), min_size=1, max_size=3),
    num_sequences=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_a_row_computes_the_same_alone_and_among_others(
    name, dtype, num_threads, passes, num_sequences, seed
):
    subject, plain = models(name, dtype, num_threads)
    sequences = [Sequence(subject, plain, seed + 7 * i, i == 3) for i in range(num_sequences)]
    for fed in passes:
        pass_over(subject, sequences, fed[:num_sequences])
    for sequence in sequences:
        sequence.context.close()
        sequence.alone.close()


@pytest.mark.covering(2)
@pytest.mark.parametrize(("name", "dtype", "num_threads"), SUBJECTS)
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_greedy_chain_is_decoding_token_by_token(name, dtype, num_threads, share):
    subject, _ = models(name, dtype, num_threads)
    vocab_size = max(1, int(share * subject.vocab_size))
    generator = torch.Generator().manual_seed(5)
    texts = [tokens_from(generator, length, 1, subject.vocab_size) for length in (1, 30, 7)]
    contexts = [Context(subject.store, ids) for ids in texts]
    ends = list(accumulate(len(ids) for ids in texts))
    batch = pack(
        [context.span(context.num_pending) for context in contexts],
        torch.tensor([token for ids in texts for token in ids]),
        [end - 1 for end in ends],
        subject.device,
    )
    drafted = subject.greedy_chain(batch, 9, vocab_size)
    assert torch.equal(drafted, chain_by_forward(subject, batch, 9, vocab_size))
    for context in contexts:
        context.close()
    assert name == "smallest" or len(set(drafted.flatten().tolist())) > 2


@pytest.mark.parametrize("name", PLAIN)
def test_logits_are_as_close_to_the_truth_as_those_of_torch(name):
    """Closer in bf16, where the residual stream stays in fp32. In fp32 torch adds up in parts, we
    in one chain, whose error grows with its length."""
    decoder = DECODERS[name]
    ids = tokens_from(torch.Generator().manual_seed(1), 150, 0, decoder.architecture.vocab_size)
    for dtype, share in ((torch.float32, 2.5), (torch.bfloat16, 1.0)):
        parameters = {n: p.to(dtype) for n, p in random_parameters(decoder).items()}
        truth = logits_of(run_by_torch(decoder, parameters, torch.float64), ids)
        ours, torchs = (
            (logits_of(model, ids) - truth).square().mean().sqrt()
            for model in (
                run_natively(decoder, parameters, dtype=dtype),
                run_by_torch(decoder, parameters, dtype),
            )
        )
        assert 0 < ours < share * torchs


def logits_of(model: LanguageModel, ids: list[int]) -> Tensor:
    return tiny.logits_of(model, ids).double()
