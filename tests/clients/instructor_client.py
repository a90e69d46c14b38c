"""instructor: a type by a tool, by a schema and by JSON, a list, a stream, and a second attempt."""

from __future__ import annotations

import instructor
import openai
from common import KEY, MODEL, PROMPT, URL, City
from pydantic import field_validator

client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)
asked = {
    "model": MODEL,
    "messages": [{"role": "user", "content": PROMPT}],
    "temperature": 0,
    "max_tokens": 200,
}
attempts = []


class Checked(City):
    """A city that is refused at first, so that the error becomes a second turn."""

    @field_validator("name")
    @classmethod
    def refuse_once(cls, value: str) -> str:
        attempts.append(value)
        if len(attempts) % 2:
            raise ValueError("not yet")
        return value


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    patched = instructor.from_openai(client, mode=mode)
    assert isinstance(patched.create(**asked, response_model=City), City), mode
    found = patched.create(**asked, response_model=Checked, max_retries=1)
    assert isinstance(found, Checked), mode
    *_, last = patched.create_partial(**asked, response_model=City)
    City.model_validate(last.model_dump())
assert len(attempts) == 4
