"""Tokenizers with and without a chat template, prompts, and tiny model folders."""

from __future__ import annotations

import copy

import pytest
from tests import tiny

from forerun.align.samples import PromptRecord, prompt_hash
from forerun.align.texts import ResponseOrigin
from forerun.models.tokenizers import Tokenizer, adopt
from forerun.sampling.config import SamplingParams

# Like those of chat models: a mark before every message, an end behind the assistant's.
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}"
    "{% if message.role == 'assistant' %}<|end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def chatty(template: str) -> Tokenizer:
    """The tiny tokenizer with a chat template."""
    backend = copy.deepcopy(tiny.backend())
    backend.chat_template = template
    return adopt(backend)


@pytest.fixture(scope="session")
def plain() -> Tokenizer:
    return tiny.tokenizer()


@pytest.fixture(scope="session")
def chat() -> Tokenizer:
    return chatty(TEMPLATE)


def prompt(*token_ids: int, tag: str = "") -> PromptRecord:
    return PromptRecord(
        prompt_ids=token_ids, prompt_hash=prompt_hash(token_ids), tag=tag, where="p.jsonl:7"
    )


def prompts(count: int) -> list[PromptRecord]:
    return [prompt(number + 1, 5, 9) for number in range(count)]


def origin(**changes: object) -> ResponseOrigin:
    params = SamplingParams(max_tokens=6, seed=1)
    values = {"source": "target", "model": "m0", "tokenizer_hash": "k0", "params": params}
    return ResponseOrigin(**(values | changes))
