"""Rules by which the tokenizers of GGUF files split a text before byte-level BPE, by their names.

Every name that llama.cpp knows is here. A rule is a list of patterns: each splits what the one
before left, into its matches and what lies between them. Where llama.cpp approximates the pattern
that a tokenizer was trained with (letters of both cases outside of ASCII), the original is used.
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
        has_bytes: characters are written in the alphabet of bytes; otherwise as they are, with a
            mark for spaces.
    """

    patterns: tuple[str, ...]
    whole_first: bool = False
    adds_bos: bool = False
    has_bytes: bool = True


ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
END_OF_SPACES = r"|\s+(?!\S)|\s+"


def _words(number: str, *, letters: str = r"\p{L}", ending: str = f"{ENDINGS}|") -> str:
    """Words with a character before them, numbers, other characters, and ends of lines."""
    return (
        rf"{ending}[^\r\n\p{{L}}\p{{N}}]?{letters}+|{number}"
        rf"| ?[^\s{letters.strip('[]')}\p{{N}}]+[\r\n]*|\s*[\r\n]+{END_OF_SPACES}"
    )


def _words_by_case(number: str, *, ending: str = "", slash: str = "/", other: str = "") -> str:
    """Words that end where lower case becomes upper case; `other` is left out of them."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{other}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{other}]"
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{ending}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{ending}"
        rf"|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n{slash}]*|\s*[\r\n]+{END_OF_SPACES}"
    )


GPT2 = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+" + END_OF_SPACES
)
DIGIT, THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"
THREE_FROM_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
LETTERS_OF_DEEPSEEK = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗ"
    "ὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯ"
    "ꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
HAN_OF_DEEPSEEK = "[一-龥ࠀ-一가-퟿]+"
PUNCTUATED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
DEEPSEEK3 = f"{PUNCTUATED}[\\r\\n]*|\\s*[\\r\\n]+{END_OF_SPACES}"
HAN_AND_KANA = "[一-龥぀-ゟ゠-ヿ]+"
LINES = r"[^\n]+|[\n]+"
SENTENCE_MARKS = r" ?[^(\s|.,!?…。，、।۔،)]+"

LLAMA3 = (_words(THREE_DIGITS),)
QWEN2 = (_words(DIGIT),)
DIGITS_THEN_GPT2 = (DIGIT, GPT2)
GPT4O = (_words_by_case(THREE_DIGITS, ending=f"{ENDINGS}?"),)
DEEPSEEK_V3 = (THREE_DIGITS, HAN_AND_KANA, DEEPSEEK3)

_RULES: Mapping[str, SplitRule] = {
    # Names with the same rule are in one line.
    "default": SplitRule(
        patterns=(r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
    ),
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
    "minicpm5": SplitRule(patterns=(THREE_DIGITS, _words(r"\p{N}+")), whole_first=True),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan grok-2 solar-open": SplitRule(
        patterns=QWEN2
    ),
    "qwen35": SplitRule(patterns=(_words(DIGIT, letters=r"[\p{L}\p{M}]"),)),
    "ufakzeka": SplitRule(patterns=(_words(DIGIT, ending=""),)),
    "laguna": SplitRule(patterns=(LINES, *QWEN2)),
    "jais-2": SplitRule(
        patterns=(
            _words(THREE_DIGITS).removesuffix(END_OF_SPACES)
            + "".join(rf"|\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))
            + r"|\s{1,2}(?!\S)|\s{1}",
        )
    ),
    "seed-coder": SplitRule(
        patterns=(
            rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+{END_OF_SPACES}",
        )
    ),
    "bailingmoe bailingmoe2 llada-moe": SplitRule(
        patterns=(
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]{END_OF_SPACES}",
        )
    ),
    "exaone-moe": SplitRule(
        patterns=(
            rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]{END_OF_SPACES}",
        )
    ),
    "tekken": SplitRule(patterns=(_words_by_case(DIGIT),), whole_first=True, adds_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": SplitRule(patterns=GPT4O),
    "granite-embed-multi-97m": SplitRule(patterns=GPT4O, whole_first=True),
    "tiny_aya cohere2moe": SplitRule(patterns=(THREE_FROM_RIGHT, *GPT4O)),
    "youtu": SplitRule(
        patterns=(
            "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
            _words_by_case(DIGIT, ending=f"{ENDINGS}?"),
        ),
        whole_first=True,
    ),
    "kimi-k2": SplitRule(
        patterns=(
            r"\p{Han}+|"
            + _words_by_case(THREE_DIGITS, ending=f"{ENDINGS}?", slash="", other=r"&&[^\p{Han}]"),
        )
    ),
    "deepseek-llm": SplitRule(
        patterns=(
            "[\r\n]",
            rf"\s?[{LETTERS_OF_DEEPSEEK}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            HAN_OF_DEEPSEEK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": SplitRule(
        patterns=("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN_OF_DEEPSEEK, DIGIT)
    ),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": SplitRule(patterns=DEEPSEEK_V3),
    "spark2_5": SplitRule(
        patterns=(
            THREE_DIGITS,
            HAN_AND_KANA,
            f"{PUNCTUATED}|[\\r\\n]{END_OF_SPACES}",
            DIGIT,
        )
    ),
    "afmoe": SplitRule(
        patterns=(
            THREE_FROM_RIGHT,
            "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
            DEEPSEEK3,
        )
    ),
    "falcon": SplitRule(patterns=(r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    "poro-chat bloom gpt3-finnish": SplitRule(patterns=(SENTENCE_MARKS,)),
    "viking": SplitRule(patterns=(SENTENCE_MARKS, DIGIT)),
    "superbpe": SplitRule(patterns=(r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "chameleon": SplitRule(
        patterns=(
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            DIGIT,
            r"[\p{P}!-/:-@\[-`{-~]",
            GPT2,
        ),
        adds_bos=True,
    ),
    "gemma4 granite-embed-multi-311m": SplitRule(
        patterns=(LINES,), adds_bos=True, has_bytes=False
    ),
    "sarvam-moe": SplitRule(patterns=(LINES,), has_bytes=False),
    "whitespace": SplitRule(patterns=(r"\S+",), has_bytes=False),
}

SPLIT_RULES: Mapping[str, SplitRule] = MappingProxyType(
    {name: rule for names, rule in _RULES.items() for name in names.split()}
)
"""Rules by the value of `tokenizer.ggml.pre`."""
