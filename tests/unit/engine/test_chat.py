"""`Engine.chat` renders a conversation with the chat template and answers it."""

from __future__ import annotations

import asyncio

import pytest
from tests import tiny

from forerun.engine.thread import AsyncEngine
from forerun.errors import InvalidRequest
from forerun.models.tokenizers import adopt
from forerun.sampling.config import SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "import os"},
]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
RENDERED = "<system>Be brief.\n<user>import os\n<assistant>"


def engine_with(template: str | None):
    backend = tiny.backend(("<chat-test>",))
    backend.chat_template = template
    engine = tiny.engine_over(tiny.adapted(tiny.network()))
    engine.tokenizer = engine.intake.tokenizer = adopt(backend)
    return engine


def test_a_conversation_is_answered_as_its_rendered_text():
    engine = engine_with(TEMPLATE)
    ids = engine.tokenizer.encode(RENDERED, add_special_tokens=False)
    (answer,) = engine.chat(MESSAGES, PARAMS)
    assert list(answer.prompt_token_ids) == ids
    assert answer.token_ids == engine.generate([ids], PARAMS)[0].token_ids
    both = engine.chat([MESSAGES, MESSAGES], sampling_params=PARAMS)
    assert [one.token_ids for one in both] == [answer.token_ids] * 2
    chunks = engine.stream(ids, sampling_params=PARAMS)
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == answer.token_ids
    assert len(answer.token_ids) == 6


PARTS = [{"type": "text", "text": "import "}, {"type": "text", "text": "os"}]


@pytest.mark.parametrize(
    ("conversation", "rendered"),
    [
        ("import os", "<user>import os\n<assistant>"),
        ([{"role": "user", "content": PARTS}], "<user>import os\n<assistant>"),
        ([{"role": "assistant", "content": None}], "<assistant>\n<assistant>"),
        ([{"role": "assistant"}], "<assistant>\n<assistant>"),
    ],
)
def test_contents_may_be_texts_parts_or_missing(conversation, rendered):
    engine = engine_with(TEMPLATE)
    ids = engine.tokenizer.encode(rendered, add_special_tokens=False)
    (answer,) = engine.chat(conversation, PARAMS)
    assert list(answer.prompt_token_ids) == ids

    async def streamed() -> list[int]:
        async with AsyncEngine(engine) as running:
            chunks = running.chat(conversation, PARAMS)
            return [token async for chunk in chunks for token in chunk.token_ids]

    assert asyncio.run(streamed()) == list(answer.token_ids)


@pytest.mark.parametrize(
    ("conversation", "said"),
    [
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url' is not supported"),
        ([{"role": "user", "content": 5}], "'int' is not supported"),
        (5, "must be a text or a list"),
        ([[5]], "a message is 5"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_other_contents_are_refused_in_a_sentence(conversation, said):
    with pytest.raises(InvalidRequest, match=said):
        engine_with(TEMPLATE).chat(conversation, PARAMS)


def test_a_model_without_a_chat_template_refuses_a_conversation():
    with pytest.raises(InvalidRequest, match="no chat template"):
        engine_with(None).chat(MESSAGES, PARAMS)
