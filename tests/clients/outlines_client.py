"""outlines: text, a stream, output as a type, as a choice and by a schema."""

from __future__ import annotations

import json
from typing import Literal

import openai
import outlines
from common import KEY, MODEL, PROMPT, URL, City

client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)
model = outlines.from_openai(client, MODEL)
asked = {"temperature": 0, "max_tokens": 200}
text = model(PROMPT, **asked)
assert text
assert "".join(model.stream(PROMPT, **asked)) == text
City.model_validate_json(model(PROMPT, City, **asked))
schema = outlines.json_schema(json.dumps(City.model_json_schema()))
City.model_validate_json(model(PROMPT, schema, **asked))
served = outlines.from_vllm(client, MODEL)
assert served(PROMPT, Literal["yes", "no"], **asked) in ("yes", "no")
assert served(PROMPT, outlines.regex("[a-c]{3}"), **asked).strip("abc") == ""
City.model_validate_json(served(PROMPT, City, **asked))
