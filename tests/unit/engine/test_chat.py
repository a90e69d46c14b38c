"""`Engine.chat` renders a conversation with the chat template and answers it."""

from __future__ import annotations

import pytest
from tests import tiny

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
    engine.tokenizer = adopt(backend)
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


def test_a_model_without_a_chat_template_refuses_a_conversation():
    with pytest.raises(InvalidRequest, match="no chat template"):
        engine_with(None).chat(MESSAGES, PARAMS)
