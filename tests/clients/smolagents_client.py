"""smolagents: an answer, and an agent that ends by a call of a tool."""

from __future__ import annotations

from common import KEY, MODEL, PROMPT, URL
from smolagents import OpenAIModel, Tool, ToolCallingAgent
from smolagents.models import ChatMessage, MessageRole


class Answer(Tool):
    """Ends the run with one of two words, which a grammar made from its schema enforces."""

    name = "final_answer"
    description = "Ends the run."
    inputs = {"answer": {"type": "string", "enum": ["yes", "no"], "description": "the answer"}}  # noqa: RUF012 (as smolagents declares it)
    output_type = "string"

    num_calls = 0

    def forward(self, answer: str) -> str:
        """Fail once, so that the agent asks a second time."""
        self.num_calls += 1
        if self.num_calls == 1:
            raise ValueError("not yet")
        return answer


model = OpenAIModel(model_id=MODEL, api_base=URL, api_key=KEY, temperature=0, max_tokens=120)
asked = ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": PROMPT}])
assert model.generate([asked]).content
streamed = "".join(part.content or "" for part in model.generate_stream([asked]))
assert streamed == model.generate([asked]).content
tool = Answer()
agent = ToolCallingAgent(
    tools=[tool], model=model, max_steps=2, verbosity_level=0, instructions="x"
)
agent.prompt_templates["system_prompt"] = "{{ '' }}"  # longer than the context of the test model
assert agent.run("Is water wet?") in ("yes", "no")
assert tool.num_calls == 2
