"""Tokenizers understood once: the same ids and text as transformers', and nothing made up."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, TokenizersBackend

from forerun.errors import InvalidModel
from forerun.models import tokenizers
from forerun.models.catalog import held_out_prompts, zoo_path
from forerun.models.tokenizers import adopt, read_tokenizer

TEXTS = (
    "",
    "def add(left, right):\n    return left + right\n",
    "  héllo wörld 😀 …  naïve\t\n\n ",
    "<s>[INST] <|end|> hi</s> <tool call> don't do n't . , !",
    "a" * 3000,
)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<s> why?"}]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level() -> TokenizersBackend:
    """As Llama 3's: a start token added, tokens that are special and one that is not."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, "de", "def", "Ġl", "<s>", "</s>"])}
    backend = Backend(models.BPE(vocabulary, merges=[("d", "e"), ("de", "f"), ("Ġ", "l")]))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+|\w+|[^\s\w]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    backend.add_tokens([AddedToken("<tool call>", special=False)])
    backend.enable_truncation(7)
    backend.enable_padding(length=5)
    return TokenizersBackend(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=TEMPLATE,
        model_max_length=9,
        clean_up_tokenization_spaces=False,
    )


def sentencepiece() -> TokenizersBackend:
    """As Llama 2's: marked spaces, bytes as tokens, special tokens that a text may not contain."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", "\u2581a", "a", "d", "e", "f", "n", "t", "\u2581d"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = [("\u2581", "a"), ("\u2581", "d")]
    backend = Backend(models.BPE(vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return TokenizersBackend(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        split_special_tokens=True,
    )


MAKERS: dict[str, Callable[[], TokenizersBackend]] = {
    "byte level": byte_level,
    "sentencepiece": sentencepiece,
}


@pytest.fixture(params=[*MAKERS, "zoo"])
def files(request, tmp_path) -> Path:
    """A folder with nothing but a tokenizer."""
    folder = tmp_path / "tokenizer"
    if request.param == "zoo":
        return Path(shutil.copytree(zoo_path("zoo:code-11m"), folder))
    MAKERS[request.param]().save_pretrained(folder)
    return folder


@pytest.fixture
def byte_level_files(tmp_path) -> Path:
    byte_level().save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def never(monkeypatch) -> None:
    """From here on transformers is not asked."""
    monkeypatch.setattr(
        tokenizers, "load_by_transformers", lambda _: pytest.fail("transformers was asked")
    )


def test_ids_and_text_are_those_of_transformers(files, tmp_path, request):
    expected = AutoTokenizer.from_pretrained(files, local_files_only=True)
    first = read_tokenizer(files, tmp_path / "cache")
    request.getfixturevalue("never")
    for ours in (first, read_tokenizer(files, tmp_path / "cache")):
        for text in (*TEXTS, *(prompt.text for prompt in held_out_prompts()[:5])):
            for special in (True, False):
                ids = expected.encode(text, add_special_tokens=special, verbose=False)
                assert ours.encode(text, add_special_tokens=special) == ids
                assert ours.decode(ids) == expected.decode(ids, skip_special_tokens=True)
        assert ours.eos_token_id == expected.eos_token_id
        assert ours.vocabulary == {token: piece for piece, token in expected.get_vocab().items()}
        assert ours.added == {
            token: (added.content, added.special)
            for token, added in expected.added_tokens_decoder.items()
        }


def test_the_tokenizers_are_worth_comparing():
    """Start tokens, truncation that must not happen, special tokens as text and as tokens."""
    ours = adopt(byte_level())
    assert ours.encode("def")[0] == ours.encode("<s>", add_special_tokens=False)[0]
    assert len(ours.encode(TEXTS[-1])) > 2000
    assert len(ours.encode("x", add_special_tokens=False)) == 1
    ids = adopt(sentencepiece()).encode("</s>", add_special_tokens=False)
    assert len(ids) > 3
    assert adopt(byte_level()).encode("</s>", add_special_tokens=False) == [ours.eos_token_id]


def test_chats_are_rendered_by_transformers(byte_level_files, tmp_path):
    for _ in range(2):
        rendered = read_tokenizer(byte_level_files, tmp_path / "cache").render_chat(MESSAGES)
        assert rendered == "<|system|>Be brief.</s><|user|><s> why?</s><|assistant|>"


def test_transformers_is_asked_for_a_template_once(byte_level_files, tmp_path, monkeypatch):
    asked = []
    real = tokenizers.load_by_transformers
    read_tokenizer(byte_level_files, tmp_path / "cache")
    monkeypatch.setattr(
        tokenizers, "load_by_transformers", lambda folder: asked.append(folder) or real(folder)
    )
    tokenizer = read_tokenizer(byte_level_files, tmp_path / "cache")
    assert not asked
    assert tokenizer.render_chat(MESSAGES) == tokenizer.render_chat(MESSAGES)
    assert asked == [byte_level_files]


def change_vocabulary(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["zz"] = len(content["model"]["vocab"]) + 5
    path.write_text(json.dumps(content))


def change_end(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "<s>"}))


@pytest.mark.parametrize(
    ("change", "is_changed"),
    [
        (change_vocabulary, lambda tokenizer: "zz" in tokenizer.vocabulary.values()),
        (change_end, lambda t: t.eos_token_id == t.encode("<s>", add_special_tokens=False)[0]),
        (
            lambda folder: (folder / "chat_template.jinja").write_text("{{ messages[0].content }}"),
            lambda tokenizer: tokenizer.render_chat(MESSAGES) == "Be brief.",
        ),
    ],
    ids=["vocabulary", "end", "template"],
)
def test_changed_files_are_read_anew(byte_level_files, tmp_path, change, is_changed):
    assert not is_changed(read_tokenizer(byte_level_files, tmp_path / "cache"))
    change(byte_level_files)
    assert is_changed(read_tokenizer(byte_level_files, tmp_path / "cache"))


@pytest.mark.parametrize("name", ["transformers", "tokenizers"])
def test_another_version_reads_anew(byte_level_files, tmp_path, monkeypatch, name, request):
    read_tokenizer(byte_level_files, tmp_path / "cache")
    real = tokenizers.version
    monkeypatch.setattr(tokenizers, "version", lambda of: "99" if of == name else real(of))
    request.getfixturevalue("never")
    with pytest.raises(pytest.fail.Exception, match="transformers was asked"):
        read_tokenizer(byte_level_files, tmp_path / "cache")


@pytest.mark.parametrize("content", ["", "{", "{}", '{"content": "{}"}'])
def test_what_is_damaged_is_read_anew(byte_level_files, tmp_path, content):
    expected = read_tokenizer(byte_level_files, tmp_path / "cache").encode(TEXTS[1])
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_text(content)
    assert read_tokenizer(byte_level_files, tmp_path / "cache").encode(TEXTS[1]) == expected


def test_what_is_refused_is_not_kept(byte_level_files, tmp_path):
    (byte_level_files / "tokenizer.json").write_text("{}")
    for _ in range(2):
        with pytest.raises(InvalidModel, match=r"tokenizer in .* cannot be loaded"):
            read_tokenizer(byte_level_files, tmp_path / "cache")
    assert not [*tmp_path.glob("cache/*")]


def test_a_tokenizer_in_python_is_refused():
    class Slow:
        is_fast = False

    with pytest.raises(InvalidModel, match=r"Slow has no tokenizer\.json"):
        adopt(Slow())


LONG = "z" * (tokenizers.MAX_CHARACTERS + 1)
PANICKING = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}


def added(number: int, content: str) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": True, **flags}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t["model"]["vocab"].update(zzzz=tokenizers.MAX_TOKENS), "int"),
        (lambda t: t["model"]["vocab"].update({LONG: 600}), "length"),
        (lambda t: t["added_tokens"].append(added(tokenizers.MAX_TOKENS, "<z>")), "int"),
        (lambda t: t["added_tokens"].append(added(600, LONG)), "length"),
        (
            lambda t: t["added_tokens"].extend(added(n, f"{n:09}" * 1000) for n in range(600, 720)),
            "added tokens of",
        ),
        (lambda t: t.update(normalizer=PANICKING), "Precompiled"),
    ],
)
def test_ids_and_tokens_beyond_the_limits_and_panics_are_refused(
    byte_level_files, tmp_path, change, named
):
    folder = shutil.copytree(byte_level_files, tmp_path / "model")
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InvalidModel, match=named):
        read_tokenizer(folder, tmp_path / "cache")


def test_ids_in_other_files_are_limited_too(byte_level_files, tmp_path):
    folder = shutil.copytree(byte_level_files, tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"] = {str(tokenizers.MAX_TOKENS): added(0, "<z>")}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(InvalidModel, match=r"tokenizer_config\.json: "):
        read_tokenizer(folder, tmp_path / "cache")
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps({"a": tokenizers.MAX_TOKENS}))
    with pytest.raises(InvalidModel, match=r"vocab\.json: "):
        read_tokenizer(folder, tmp_path / "cache")


def test_errors_of_the_library_while_it_encodes_are_named():
    words = Backend(models.WordLevel({"a": 0}, unk_token="<unk>"))
    tokenizer = adopt(TokenizersBackend(tokenizer_object=words))
    with pytest.raises(InvalidModel, match=r"cannot encode a text: WordLevel error"):
        tokenizer.encode("b")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_an_interrupt_is_no_error_of_a_tokenizer(error):
    with pytest.raises(error), tokenizers.as_invalid("x"):
        raise error
