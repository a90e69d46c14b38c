"""Tokenizers from the metadata of GGUF files: byte-level BPE, and SentencePiece's BPE by scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from forerun.errors import InvalidModel
from forerun.models.gguf.file import GGUFFile
from forerun.models.gguf.splits import SPLIT_RULES, SplitRule

SPACE = "\u2581"
CONTROL, USER_DEFINED, BYTE = 3, 4, 6
"""Types of tokens in `tokenizer.ggml.token_type`."""
ENDS = frozenset(
    "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <end_of_turn> <end_of_utterance> <EOT> _<EOT> [EOT] "
    "<|endoftext|> <|end_of_text|> <\uff5cend\u2581of\u2581sentence\uff5c>".split()
)
"""Control tokens that end a turn or a text where the file does not say so, as in llama.cpp."""
MAX_WORK = 1 << 28
"""Most characters that are looked at to find merges, the square of every token's length."""
ROLES: Mapping[str, str] = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}
"""Names of special tokens in a chat template, and in the metadata."""


def split_rule(file: GGUFFile) -> SplitRule:
    """Return how a file's tokenizer splits texts; raises InvalidModel for an unknown name."""
    name = file.metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in SPLIT_RULES:
        near = ", ".join(get_close_matches(str(name), SPLIT_RULES, n=3))
        raise InvalidModel(
            f"{file.path} splits texts by the rule {name!r:.40}, which is not known; "
            f"{near and f'of similar name are {near}; '}to choose one of the rules in "
            "docs/gguf-tokenizers.md, run gguf-new-metadata --pre-tokenizer NAME OLD.gguf NEW.gguf"
        )
    return SPLIT_RULES[name]


def build_tokenizer(file: GGUFFile) -> Backend:
    """Build the tokenizer that the metadata of a file describe (InvalidModel)."""
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise InvalidModel(
            f"{file.path} has a tokenizer of the kind {kind!r:.40}; read are gpt2 and llama: give "
            "the model in its original form, a folder with tokenizer.json"
        )
    tokens = file.array("tokenizer.ggml.tokens")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if not tokens or not all(type(token) is str for token in tokens):
        raise InvalidModel(f"{file.path} has no list of tokens; fetch it again")
    try:
        backend = (
            _build_byte_level(file, vocabulary)
            if kind == "gpt2"
            else _build_by_scores(file, tokens)
        )
        _add_special(backend, file, tokens)
        _add_ends(backend, file, tokens, by_default=kind == "llama")
    except InvalidModel:
        raise
    except Exception as error:  # of a library in another language
        raise InvalidModel(
            f"the tokenizer in {file.path} cannot be built: {error!s:.200}; fetch it again"
        ) from error
    return backend


def special_tokens(file: GGUFFile) -> dict[str, str]:
    """Return the tokens that chat templates may name."""
    tokens = file.array("tokenizer.ggml.tokens")
    numbers = {role: file.token_id(short) for role, short in ROLES.items()}
    return {
        role: tokens[number]
        for role, number in numbers.items()
        if number is not None and number < len(tokens)
    }


def _read_merges(file: GGUFFile) -> list[tuple[str, str]]:
    found = []
    for merge in file.array("tokenizer.ggml.merges"):
        # The first part may itself be a space.
        place = merge.find(" ", 1)
        found.append((merge[:place], merge[place + 1 :]))
    return found


def _build_byte_level(file: GGUFFile, vocabulary: Mapping[str, int]) -> Backend:
    rule = split_rule(file)
    model = BPE(
        vocab=dict(vocabulary),
        merges=_read_merges(file),
        ignore_merges=rule.whole_first,
    )
    backend = Backend(model)
    splits: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rule.patterns
    ]
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.decoder = decoders.ByteLevel()
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    return backend


def _build_by_scores(file: GGUFFile, tokens: Sequence[str]) -> Backend:
    """SentencePiece's BPE: of neighbours whose union is a token the best score is merged first."""
    # Tokens of spaces may be written with spaces.
    tokens = [SPACE * len(t) if " " in t and not t.strip(" ") else t for t in tokens]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    unknown = file.token_id("unknown")
    backend = Backend(
        BPE(
            vocab=vocabulary,
            merges=_read_merges(file) or _rank_merges(file, vocabulary),
            unk_token=tokens[unknown] if unknown is not None and unknown < len(tokens) else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True) is not False
    steps: list[Any] = [normalizers.Prepend(SPACE)] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    backend.decoder = _decode_spaces(int(has_prefix))
    return backend


def _decode_spaces(num_stripped: int) -> Any:
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if num_stripped:
        steps.append(decoders.Strip(" ", num_stripped, 0))
    return decoders.Sequence(steps)


def _rank_merges(file: GGUFFile, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the pairs of tokens whose union is a token, those of the best score first."""
    scores = file.array("tokenizer.ggml.scores")
    if len(scores) < len(vocabulary):
        raise InvalidModel(f"{file.path} has neither merges nor scores of its tokens")
    if sum(len(token) ** 2 for token in vocabulary) > MAX_WORK:
        raise InvalidModel(f"{file.path} has tokens that are too long to find merges for")
    found = []
    for token, number in vocabulary.items():
        pairs = [
            (vocabulary[token[:place]], vocabulary[token[place:]])
            for place in range(1, len(token))
            if token[:place] in vocabulary and token[place:] in vocabulary
        ]
        found += [(-scores[number], number, pair, token) for pair in sorted(pairs)]
    found.sort(key=lambda entry: entry[:3])
    by_number = {number: name for name, number in vocabulary.items()}
    return [(by_number[first], by_number[second]) for _, _, (first, second), _ in found]


def _add_special(backend: Backend, file: GGUFFile, tokens: Sequence[str]) -> None:
    """Add the tokens that are found in a text before it is split."""
    types = file.array("tokenizer.ggml.token_type")
    named = list(zip(tokens, types, strict=False))
    # As llama.cpp has it.
    strips = file.form.strips_after_special and SPACE in "".join(tokens[:1000])
    backend.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True, rstrip=strips and "|" in token)
            for token, kind in named
            if kind == CONTROL and token
        ]
    )
    backend.add_tokens(
        [
            AddedToken(token, normalized=False)
            for token, kind in named
            if kind == USER_DEFINED and token
        ]
    )


def _add_ends(backend: Backend, file: GGUFFile, tokens: Sequence[str], *, by_default: bool) -> None:
    """Add the tokens before and behind every text that the file asks for."""
    if not by_default:
        by_default = split_rule(file).adds_bos
    wanted = {
        "bos": file.metadata.get("tokenizer.ggml.add_bos_token", by_default) is True,
        "eos": file.metadata.get("tokenizer.ggml.add_eos_token", False) is True,
    }
    numbers = {name: file.token_id(name) for name, is_wanted in wanted.items() if is_wanted}
    known = {
        name: (tokens[number], number)
        for name, number in numbers.items()
        if number is not None and number < len(tokens)
    }
    if not known:
        return
    template = ["$A"]
    if "bos" in known:
        template.insert(0, known["bos"][0])
    if "eos" in known:
        template.append(known["eos"][0])
    backend.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=list(known.values())
    )
