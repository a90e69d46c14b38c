"""Tokenizers of GGUF files: ids as llama.cpp has them under every name of a rule, and templates."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import gguf
import pytest
from gguf import GGMLQuantizationType
from tests.gguf_files import all_of, write_gguf, write_tiny_folder
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from forerun.errors import InvalidModel
from forerun.models.checkpoint import ModelFiles
from forerun.models.gguf.file import GGUFFile
from forerun.models.gguf.splits import SPLIT_RULES
from forerun.models.gguf.tokenizer import MAX_WORK, build_tokenizer, special_tokens

RECORDED = json.loads((Path(__file__).parent / "data" / "gguf_splits.json").read_text())
NAMES = [(index, name) for index, names in enumerate(RECORDED["groups"]) for name in names.split()]


def write(
    place: Path,
    tokens: list[str],
    *,
    merges: list[str] | None = None,
    scores: list[float] | None = None,
    types: list[int] | None = None,
    architecture: str = "llama",
    **settings: str | int | bool,
) -> Path:
    """Write a file of a tokenizer alone; `settings` are those of `tokenizer.ggml`."""
    writer = gguf.GGUFWriter(place, architecture)
    writer.add_token_list(tokens)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    writer.add_token_types(types or [1] * len(tokens))
    for name, value in settings.items():
        key = name if name.startswith("tokenizer.") else f"tokenizer.ggml.{name}"
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
        add[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return place


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("index", "name"), NAMES, ids=lambda value: str(value))
def test_ids_are_those_of_llama_cpp_under_every_name(index, name, tmp_path):
    vocabulary = RECORDED["vocabulary"]
    tokens = vocabulary["tokens"]
    types = [3 if t in ("<s>", "</s>") else 6 if t.startswith("<0x") else 1 for t in tokens]
    settings = {"model": "gpt2", "pre": name, "add_bos_token": False}
    path = write(tmp_path / "x.gguf", tokens, merges=vocabulary["merges"], types=types, **settings)
    backend = build_tokenizer(GGUFFile(path))
    num_tried = 0
    for line, results in RECORDED["lines"]:
        for indices, ids in results:
            if index in indices:
                assert backend.encode(line).ids == ids, repr(line)
                num_tried += 1
    assert num_tried >= 80  # of 126; those left out are said in the file


def test_every_name_has_a_recording():
    assert {name for _, name in NAMES} == SPLIT_RULES.keys()


@pytest.mark.parametrize("name", sorted(GGUF_PRE_TOKENIZER_SPLITS.keys() & SPLIT_RULES.keys()))
def test_splits_are_those_of_transformers_where_it_knows_the_name(name):
    """Where llama.cpp approximates a pattern, transformers has the original."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Sequence, Split

    theirs = Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), behavior="isolated")
    ours = Sequence([Split(Regex(p), behavior="isolated") for p in SPLIT_RULES[name].patterns])
    for line, _ in RECORDED["lines"]:
        assert ours.pre_tokenize_str(line) == theirs.pre_tokenize_str(line), repr(line)


def test_digits_are_isolated_before_spaces_are_joined(tmp_path):
    tokens = ["1", "2", "\u0120", "\u0120\u0120", "\u0120\u0120\u0120\u0120"]
    merges = ["\u0120 \u0120", "\u0120\u0120 \u0120\u0120"]
    path = write(tmp_path / "x.gguf", tokens, merges=merges, model="gpt2", pre="smollm")
    assert build_tokenizer(GGUFFile(path)).encode("    12").tokens == [tokens[4], "1", "2"]


@pytest.mark.parametrize(("name", "expected"), [("glm4", ["abc"]), ("qwen2", ["ab", "c"])])
def test_a_piece_that_is_a_token_is_not_merged_from_parts_under_some_names(
    name, expected, tmp_path
):
    tokens = ["a", "b", "c", "ab", "abc"]
    path = write(tmp_path / "x.gguf", tokens, merges=["a b"], model="gpt2", pre=name)
    assert build_tokenizer(GGUFFile(path)).encode("abc").tokens == expected


def test_the_first_part_of_a_merge_may_be_a_space(tmp_path):
    settings = {"model": "gpt2", "pre": "gpt-2"}
    path = write(tmp_path / "x.gguf", [" ", "a", " a"], merges=["  a"], **settings)
    assert build_tokenizer(GGUFFile(path)).get_vocab_size() == 3


def test_an_unknown_rule_is_refused_with_what_chooses_another(tmp_path):
    path = write(tmp_path / "x.gguf", ["a"], merges=["a a"], model="gpt2", pre="smolm")
    for read in (lambda path: ModelFiles.find(path).tokenizer, ModelFiles.open):
        with pytest.raises(InvalidModel, match=r"'smolm'.*smollm.*new-metadata --pre-tokenizer"):
            read(path)


def merged_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """Merge the neighbours of the best score until none is a token, as SentencePiece does."""
    parts = list("\u2581" + text.replace(" ", "\u2581"))
    while True:
        pairs = [
            (scores[a + b], -place)
            for place, (a, b) in enumerate(pairwise(parts))
            if a + b in scores
        ]
        if not pairs:
            return parts
        place = -max(pairs)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(tmp_path):
    words = ["\u2581t", "he", "\u2581the", "\u2581\u2581", "th", "in", "ing", "\u2581in", "an"]
    letters = sorted({*"\u2581theinagx "} - {" "})
    controls = ["<unk>", "<s>", "</s>"]
    tokens = [*controls, *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters]
    scores = [0.0] * 259 + [-float(n) for n in range(len(words) + len(letters))]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(letters))
    settings = {"model": "llama", "unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    path = write(tmp_path / "x.gguf", tokens, scores=scores, types=types, **settings)
    backend = build_tokenizer(GGUFFile(path))
    known = dict(zip(tokens[259:], scores[259:], strict=True))
    for text in ("the thing in  the than", "  in", "xx tthe", "inging ingthe"):
        assert backend.encode(text).tokens == ["<s>", *merged_by_score(text, known)], text
        assert backend.decode(backend.encode(text).ids) == text
    assert backend.encode("\u00e9", add_special_tokens=False).tokens[1:] == ["<0xC3>", "<0xA9>"]
    # Text behind a special token begins like any text.
    assert backend.encode("</s>the").tokens == ["<s>", "</s>", "\u2581the"]
    bare = write(
        tmp_path / "y.gguf",
        tokens,
        scores=scores,
        types=types,
        add_space_prefix=False,
        add_bos_token=False,
        **settings,
    )
    assert build_tokenizer(GGUFFile(bare)).encode("the").tokens == ["t", "he"]


def test_tokens_that_are_too_long_to_find_merges_for_are_refused(tmp_path):
    tokens = [f"{n:04}" + "a" * 4000 for n in range(MAX_WORK // 4000**2 + 1)]
    path = write(tmp_path / "x.gguf", tokens, scores=[0.0] * len(tokens), model="llama")
    with pytest.raises(InvalidModel, match="too long to find merges"):
        build_tokenizer(GGUFFile(path))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model": "bert"}, "of the kind 'bert'"),
        ({"model": "llama"}, "neither merges nor scores"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["a b"]}, "cannot be built"),
    ],
)
def test_a_tokenizer_that_cannot_be_built_is_refused(settings, said, tmp_path):
    path = write(tmp_path / "x.gguf", ["a"], **settings)
    with pytest.raises(InvalidModel, match=said):
        _ = ModelFiles.find(path).tokenizer


def test_special_tokens_outside_of_the_vocabulary_are_none(tmp_path):
    outside = dict.fromkeys(("unknown_token_id", "bos_token_id", "eos_token_id"), 2)
    path = write(tmp_path / "x.gguf", ["\u2581", "a"], scores=[0.0, 0.0], model="llama", **outside)
    file = GGUFFile(path)
    assert build_tokenizer(file).encode("a").tokens == ["\u2581", "a"]
    assert special_tokens(file) == {}


def test_some_control_tokens_of_phi3_take_the_space_behind_them(tmp_path):
    path = write(
        tmp_path / "x.gguf",
        ["\u2581", "a", "</s>", "<|end|>"],
        scores=[0.0] * 4,
        types=[1, 1, 3, 3],
        architecture="phi3",
        model="llama",
        add_bos_token=False,
        add_space_prefix=False,
    )
    backend = build_tokenizer(GGUFFile(path))
    assert backend.encode("<|end|> a").ids == [3, 1]
    assert backend.encode("</s> a").ids == [2, 0, 1]


def test_the_template_and_the_ends_of_the_file_are_used(tmp_path):
    """A turn ends with another token than a text, and a message with a third."""
    tokens = ["a", "b", "<s>", "</s>", "<|end|>", "<|message|>"]
    path = write(
        tmp_path / "x.gguf",
        tokens,
        types=[1, 1, 3, 3, 3, 3],
        model="gpt2",
        pre="llama-bpe",
        bos_token_id=2,
        eos_token_id=3,
        eot_token_id=4,
        eom_token_id=5,
        **{
            "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}"
            "{{ eos_token }}{% endfor %}"
        },
    )
    tokenizer = ModelFiles.find(path).tokenizer
    assert tokenizer.eos_token_id == 3
    assert GGUFFile(path).eos_token_ids == {3, 4, 5}
    text = tokenizer.render_chat([{"role": "user", "content": "ab"}])
    assert text == "<s>ab</s>"
    assert tokenizer.encode(text, add_special_tokens=False) == [2, 0, 1, 3]
    # As the rule has it, where the file says nothing.
    assert build_tokenizer(GGUFFile(path)).encode("ab").ids == [2, 0, 1]


def test_control_tokens_that_end_a_turn_by_their_name_end_texts(tmp_path, monkeypatch):
    """Files of Llama 3 and Gemma name the end of a text alone."""
    folder = write_tiny_folder(tmp_path / "folder")
    path = write_gguf(tmp_path / "x.gguf", folder, all_of(GGMLQuantizationType.F32))
    tokens = ["<end_of_turn>", "<|im_end|>", "plain"]
    turns = write(
        tmp_path / "t.gguf", tokens, merges=None, types=[3, 1, 3], model="gpt2", pre="gpt-2"
    )
    tokenizer = ModelFiles.find(turns).tokenizer
    assert ModelFiles.open(path).eos_token_ids(tokenizer) == {
        0
    }  # once named in the file, once by its name
    assert tokenizer.eos_token_id is None
