"""Rules by which the tokenizers of GGUF files split a text before byte-level BPE, by their names.

Every rule that a supported architecture may have is here, under all of its names in llama.cpp. A
rule is a list of patterns: each splits what the one before left, into its matches and what lies
between them. Where llama.cpp approximates the pattern that a tokenizer was trained with (letters
of both cases outside of ASCII), the original is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule:
    """How a text is split, and what else a name stands for.

    Attributes:
        patterns: in the order in which they are applied.
        whole_first: a piece that is a token is not merged from parts.
        adds_bos: a text begins with the token for it, unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    whole_first: bool = False
    adds_bos: bool = False


def _list_class(ranges: str) -> str:
    """Return a class of characters from ranges of hexadecimal numbers."""
    numbers = (part.split("-") for part in ranges.split())
    parts = ("-".join(rf"\x{{{number}}}" for number in part) for part in numbers)
    return f"[{''.join(parts)}]"


ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
END_OF_SPACES = r"|\s+(?!\S)|\s+"


def _match_words(number: str, *, ending: str = f"{ENDINGS}|") -> str:
    """Words with a character before them, numbers, other characters, and ends of lines."""
    return (
        rf"{ending}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{number}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+{END_OF_SPACES}"
    )


def _match_cased_words(number: str, *, ending: str = "") -> str:
    """Words that end where lower case becomes upper case."""
    upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
    lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{ending}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{ending}"
        rf"|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+{END_OF_SPACES}"
    )


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+" + END_OF_SPACES
DIGIT, THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"
LETTERS_OF_DEEPSEEK = _list_class(
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376-377 37b-37d 37f "
    "386 388-38a 38c 38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd "
    "1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 "
    "1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 "
    "1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 "
    "2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183-2184 "
    "2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2-2cf3 a640-a66d a680-a69b a722-a76f a771-a787 "
    "a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 "
    "104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943"
)
HAN_OF_DEEPSEEK = _list_class("800-9fa5 ac00-d7ff") + "+"
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+" + END_OF_SPACES
)
SENTENCE_MARKS = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{ff0c}\x{3001}\x{964}\x{6d4}\x{60c})]+"

LLAMA3 = (_match_words(THREE_DIGITS),)
QWEN2 = (_match_words(DIGIT),)
DIGITS_THEN_GPT2 = (DIGIT, GPT2)
GPT4O = (_match_cased_words(THREE_DIGITS, ending=f"{ENDINGS}?"),)
DEEPSEEK_V3 = (THREE_DIGITS, _list_class("4e00-9fa5 3040-30ff") + "+", DEEPSEEK3)

_RULES: Mapping[str, SplitRule] = {
    # Names with the same rule are in one line.
    "default": SplitRule(patterns=(r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe "
    "gigachat a.x-4.0 mellum modern-bert mpt olmo jais trillion granite-docling exaone4": SplitRule(
        patterns=(GPT2,)
    ),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": SplitRule(
        patterns=DIGITS_THEN_GPT2
    ),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": SplitRule(
        patterns=LLAMA3, whole_first=True, adds_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe": SplitRule(patterns=LLAMA3),
    "glm4 glm5": SplitRule(patterns=LLAMA3, whole_first=True),
    "minicpm5": SplitRule(patterns=(THREE_DIGITS, _match_words(r"\p{N}+")), whole_first=True),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan grok-2 solar-open": SplitRule(
        patterns=QWEN2
    ),
    "ufakzeka": SplitRule(patterns=(_match_words(DIGIT, ending=""),)),
    "seed-coder": SplitRule(
        patterns=(
            rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+{END_OF_SPACES}",
        )
    ),
    "tekken": SplitRule(patterns=(_match_cased_words(DIGIT),), whole_first=True, adds_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": SplitRule(patterns=GPT4O),
    "deepseek-llm": SplitRule(
        patterns=(
            "[\r\n]",
            rf"\s?{LETTERS_OF_DEEPSEEK}+",
            r"\s?" + _list_class("21-2f 3a-7e ff01-ff0f ff1a-ff5e 2018-201f 3000-3002") + "+",
            r"\s+$",
            HAN_OF_DEEPSEEK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": SplitRule(
        patterns=("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN_OF_DEEPSEEK, DIGIT)
    ),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": SplitRule(patterns=DEEPSEEK_V3),
    "viking": SplitRule(patterns=(SENTENCE_MARKS, DIGIT)),
    "superbpe": SplitRule(patterns=(r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
}

SPLIT_RULES: Mapping[str, SplitRule] = MappingProxyType(
    {name: rule for names, rule in _RULES.items() for name in names.split()}
)
"""Rules by the value of `tokenizer.ggml.pre`."""
