"""dspy: answers, a prediction of typed fields by a schema, and a second turn after a call."""

from __future__ import annotations

from typing import Literal

import dspy
from common import KEY, MODEL, PROMPT, URL

lm = dspy.LM(
    f"openai/{MODEL}", api_base=URL, api_key=KEY, temperature=0, max_tokens=60, cache=False
)
(text,) = lm(PROMPT)
assert text
call = {"id": "call-1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
history = [
    {"role": "user", "content": PROMPT},
    {"role": "assistant", "content": None, "tool_calls": [call]},
    {"role": "tool", "tool_call_id": "call-1", "content": "found"},
]
assert lm(messages=history)


class Kind(dspy.Signature):
    """Say what it is."""

    code: str = dspy.InputField()
    kind: Literal["code", "prose"] = dspy.OutputField()


schema = {
    "type": "object",
    "properties": {"kind": {"enum": ["code", "prose"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
form = {"type": "json_schema", "json_schema": {"name": "kind", "schema": schema}}
with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
    found = dspy.Predict(Kind, response_format=form)(code=PROMPT)
assert found.kind in ("code", "prose")
