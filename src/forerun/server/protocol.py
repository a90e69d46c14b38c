"""Bodies of requests, with the names of the OpenAI API and of vLLM.

Types are checked here; the values of sampling parameters are checked by `SamplingParams`, so that
the server refuses the same values with the same messages as the library.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from forerun.bounded_read import parse_json
from forerun.control.base import Chain, Plan, Tree
from forerun.engine.config import EngineConfig
from forerun.engine.intake import Intake, Prompt, text_of
from forerun.engine.results import Capabilities
from forerun.errors import InvalidRequest, UnreadableInput
from forerun.sampling.config import SamplingParams

Ids = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
"""List types that stop at the first invalid entry, because a report of all of them may be long."""

SAME_NAMES = (
    "temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty seed "
    "min_tokens stop_token_ids ignore_eos include_stop_str_in_output allowed_token_ids "
    "bad_token_ids n"
).split()
"""Fields with the same name in SamplingParams."""


IGNORED = frozenset(
    "add_generation_prompt continue_final_message include_reasoning modalities "
    "parallel_tool_calls prompt_cache_key prompt_cache_retention reasoning_effort request_id "
    "safety_identifier service_tier skip_special_tokens spaces_between_special_tokens "
    "truncate_prompt_tokens verbosity".split()
)
"""Fields of OpenAI's and vLLM's requests that client libraries send and that change no token here.
A value that would change the text is refused below (`CHANGING`)."""
CHANGING: Mapping[str, object] = MappingProxyType(
    {
        "add_generation_prompt": True,
        "continue_final_message": False,
        "modalities": ["text"],
        "skip_special_tokens": True,
    }
)
"""Values at which an ignored field changes nothing; other values are refused."""
MESSAGE_EXTRAS = frozenset({"refusal", "annotations", "audio", "function_call"})
"""Fields of messages in OpenAI's answers that clients send back; accepted if null or empty."""


MAX_FIELDS = 256
MAX_MESSAGES = 4096
MAX_BIASES = 4096
MAX_LOGPROBS = 20


class Body(BaseModel):
    """Base of all bodies: null is unset; unknown fields and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_unset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_FIELDS:  # an error for each of them would take seconds
            raise PydanticCustomError("too_many", "more than {n} fields", {"n": MAX_FIELDS})
        return {name: value for name, value in data.items() if value is not None}


class StreamOptions(Body):
    """Options for the fields of streamed events."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class TreeShape(Body):
    """Limits of a draft tree: number of nodes, number of levels, and children per node."""

    num_nodes: Annotated[int, Field(ge=1)]
    depth: Annotated[int, Field(ge=1)]
    width: Annotated[int, Field(ge=1)]


class SpeculationChoice(Body):
    """The drafter and the shape of the drafts for one request."""

    drafter: str | None = None
    num_speculative_tokens: Annotated[int, Field(ge=0)] | None = None
    tree: TreeShape | None = None


class JsonSchemaFormat(Body):
    """A named JSON schema, in the form of the OpenAI API."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of the text: free, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @property
    def schema_(self) -> dict[str, Any]:
        """The JSON schema of the text."""
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise InvalidRequest("response_format needs json_schema with type json_schema only")
        return {"type": "object"} if self.json_schema is None else self.json_schema.schema_


class GenerationFields(Body):
    """The fields that all routes which generate text share."""

    ignored: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _take_ignored(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if "ignored" in data:
            raise PydanticCustomError("extra_forbidden", "is not a known field")
        found = sorted(name for name in data.keys() & IGNORED if data[name] is not None)
        for name in found:
            if name in CHANGING and data[name] != CHANGING[name]:
                raise PydanticCustomError(
                    "not_supported",
                    "{name} is not supported; leave it out or send {value}",
                    {"name": name, "value": json.dumps(CHANGING[name])},
                )
        rest = {name: value for name, value in data.items() if name not in IGNORED}
        return rest | {"ignored": tuple(found)} if found else rest

    model: str | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Annotated[dict[str, Any], Field(max_length=MAX_BIASES)] | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1)] = 1
    stop: str | Texts | None = None
    stop_token_ids: Ids = []
    allowed_token_ids: Ids | None = None
    bad_token_ids: Ids = []
    min_tokens: int = 0
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    speculation: Literal["auto", "off"] | str | SpeculationChoice = "auto"
    deadline_s: float | None = None
    priority: int = 0
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_token_sources: bool = False
    user: str | None = None
    metadata: dict[str, Any] | None = None
    best_of: int | None = None
    store: bool | None = None

    @model_validator(mode="after")
    def _check_best_of(self) -> GenerationFields:
        if self.best_of not in (None, self.n):
            message = "best_of is not supported; leave it out or send the value of n"
            raise PydanticCustomError("not_supported", message)
        return self


class GenerationRequest(GenerationFields):
    """A request for text: what the engine needs of it."""

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Number of alternatives per token in the response; None for no log-probabilities."""

    @property
    def longest(self) -> int | None:
        """Largest number of output tokens; None allows all that fit into the context."""
        return self.max_tokens

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for tokens of the prompt."""
        return None

    @property
    def forced_tools(self) -> list[dict[str, Any]]:
        """The tools of which the answer has to call one; empty where it may be text."""
        return []

    def may_be_stored(self, is_usual: bool) -> bool:
        """Whether the texts may be kept for training; `is_usual` is what the key says of it."""
        return is_usual if self.store is None else self.store

    @property
    def has_grammar(self) -> bool:
        forms = (self.response_format, self.structured_outputs)
        return any(form is not None for form in forms) or bool(self.forced_tools)

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def last_message(self) -> str | None:
        """The last message of the user of a conversation."""
        return None

    @abstractmethod
    def prompts_for(self, intake: Intake) -> list[Prompt]:
        """Return the prompts: texts or token ids; conversations are rendered."""

    def _find_form(self, call_grammar: str | None) -> dict[str, Any] | None:
        """Return the form that the text has to follow; None for any text."""
        given: list[dict[str, Any]] = []
        if call_grammar is not None:
            given.append({"grammar": call_grammar})
        if self.structured_outputs is not None:
            given.append(self.structured_outputs)
        if self.response_format is not None and self.response_format.type != "text":
            given.append({"json": self.response_format.schema_})
        if len(given) > 1:
            raise InvalidRequest(
                "the text can follow one grammar; the request gives several (a tool_choice other "
                "than auto and none is one)"
            )
        return given[0] if given else None

    def take_defaults(self, defaults: Mapping[str, float]) -> None:
        """Set the fields that the request left out to those that the model states."""
        for name in defaults.keys() - self.model_fields_set:
            setattr(self, name, defaults[name])

    def sampling(self, call_grammar: str | None = None) -> SamplingParams:
        """Return the sampling parameters, with the grammar of a text that calls a forced tool.

        Raises InvalidRequest where a value cannot be honoured.
        """
        for asked in (self.num_logprobs, self.num_prompt_logprobs):
            if asked is not None and asked > MAX_LOGPROBS:
                raise InvalidRequest(
                    f"{asked} log-probabilities per token are asked for; this server returns at "
                    f"most {MAX_LOGPROBS}"
                )
        values = {name: getattr(self, name) for name in SAME_NAMES}
        return SamplingParams(
            **values,
            stop=self.stop or (),  # type: ignore[arg-type]  # lists become tuples there
            logit_bias=self.logit_bias,  # type: ignore[arg-type]  # and keys integers
            max_tokens=self.longest,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            structured_outputs=self._find_form(call_grammar),  # type: ignore[arg-type]  # checked there
        )

    def plan(self, capabilities: Capabilities, config: EngineConfig) -> Plan | None:
        """Return the plan given by `speculation`; None leaves the choice to the controller.

        Raises InvalidRequest where there is no such drafter, or it drafts fewer tokens.
        """
        asked = self.speculation
        if asked == "auto":
            return None
        if asked == "off":
            return Plan()
        if isinstance(asked, str):
            asked = SpeculationChoice(drafter=asked)
        return plan_of(asked, capabilities.methods, config)


def plan_of(asked: SpeculationChoice, methods: tuple[str, ...], config: EngineConfig) -> Plan:
    """Return the plan for the drafter and shape of a request; see `GenerationRequest.plan`."""
    if asked.tree is not None and asked.num_speculative_tokens is not None:
        raise InvalidRequest("speculation names num_speculative_tokens and a tree; give one")
    if not methods:
        raise InvalidRequest("speculation names a drafter, but this server decodes plainly")
    method = methods[0] if asked.drafter is None else asked.drafter
    if method not in methods:
        raise InvalidRequest(
            f"speculation names the drafter {method!r}; there are {', '.join(methods)}, "
            '"auto" and "off"'
        )
    shape: Chain | Tree
    most = config.max_chain if asked.tree is None else config.max_nodes
    if asked.tree is not None:
        shape = Tree(**asked.tree.model_dump())
    else:
        given = asked.num_speculative_tokens
        shape = Chain(num_tokens=most if given is None else given)
    if shape.num_nodes > most:
        raise InvalidRequest(
            f"speculation asks for {shape.num_nodes} draft tokens; this server drafts at most "
            f"{most}: ask for fewer, or start it with a larger --num-speculative-tokens"
        )
    return Plan(method=method, shape=shape) if shape.num_nodes else Plan()


class CompletionRequest(GenerationRequest):
    """Body of `/v1/completions`."""

    prompt: str | Ids | Texts | Annotated[list[Ids], Field(fail_fast=True)]
    logprobs: Annotated[int, Field(ge=0)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool = False
    suffix: None = None

    @model_validator(mode="after")
    def _check_stream(self) -> CompletionRequest:
        if self.stream and self.num_prompt_logprobs is not None:
            message = "log-probabilities of the prompt are not streamed; leave stream out"
            raise PydanticCustomError("not_supported", message)
        return self

    @property
    def is_only_scored(self) -> bool:
        """Whether the request is for log-probabilities of its prompt and for no further token."""
        return self.echo and self.max_tokens == 0

    @property
    def longest(self) -> int | None:
        return 1 if self.is_only_scored else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        if self.prompt_logprobs is None and self.echo:
            return self.logprobs
        return self.prompt_logprobs

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts as a list, which has one item for a single prompt."""
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            return list(cast(list[Prompt], prompt))
        return [cast(Prompt, prompt)]

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    def prompts_for(self, intake: Intake) -> list[Prompt]:
        """Return the prompts: texts or token ids."""
        return self.prompts


def _as_text(content: object) -> str:
    try:
        return text_of(content)
    except InvalidRequest as error:
        raise PydanticCustomError("not_supported", "{said}", {"said": str(error)}) from None


class ChatMessage(Body):
    """One message of a conversation."""

    role: str
    content: Annotated[str, BeforeValidator(_as_text)] = ""
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_extras(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {k: v for k, v in data.items() if v or k not in MESSAGE_EXTRAS}

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form that chat templates read.

        The arguments of tool calls become objects.
        """
        message = self.model_dump(exclude_none=True)
        for call in message.get("tool_calls") or ():
            function = call.get("function")
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                with suppress(UnreadableInput):  # else the template gets the text
                    function["arguments"] = parse_json(function["arguments"], "the arguments")
        return message


class ToolName(Body):
    """The name of a tool."""

    name: str


class NamedTool(Body):
    """A tool that the answer has to call."""

    type: Literal["function"]
    function: ToolName


Messages = Annotated[
    list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]


class ChatRequest(GenerationRequest):
    """Body of `/v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def num_logprobs(self) -> int | None:
        if not self.logprobs:
            if self.top_logprobs:
                raise InvalidRequest("top_logprobs needs logprobs to be true")
            return None
        return self.top_logprobs or 0

    @property
    def longest(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def prompts_for(self, intake: Intake) -> list[Prompt]:
        """Return the token ids of the rendered conversation.

        Tools that its template leaves out count as an ignored field, except under a grammar.
        """
        given = [message.for_template() for message in self.messages]
        variables = self.template_variables
        ids = intake.render(given, variables)
        if "tools" in variables and not self.forced_tools:
            without = {name: value for name, value in variables.items() if name != "tools"}
            if intake.render(given, without) == ids:
                self.ignored += ("tools",)
        return [ids]

    @property
    def last_message(self) -> str | None:
        """The last message of the user of a conversation."""
        asked = [message for message in self.messages if message.role == "user"]
        return asked[-1].content if asked else None

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def tool_names(self) -> list[str]:
        functions = [tool.get("function") for tool in self.offered_tools]
        names = [each.get("name") for each in functions if isinstance(each, dict)]
        return [name for name in names if isinstance(name, str)]

    @property
    def forced_tools(self) -> list[dict[str, Any]]:
        if self.tool_choice in (None, "auto", "none"):
            return []
        if not self.offered_tools or len(self.tool_names) < len(self.offered_tools):
            raise InvalidRequest(
                'tool_choice needs tools of the form {"type": "function", "function": {"name": '
                '..., "parameters": ...}}'
            )
        if not isinstance(self.tool_choice, NamedTool):
            return self.offered_tools
        name = self.tool_choice.function.name
        if name not in self.tool_names:
            raise InvalidRequest(f"tool_choice names {name!r:.200}, which is none of the tools")
        return [tool for tool in self.offered_tools if tool["function"]["name"] == name]

    @property
    def template_variables(self) -> dict[str, Any]:
        """Additional variables of the chat template."""
        variables = dict(self.chat_template_kwargs or {})
        if self.offered_tools:
            variables["tools"] = self.offered_tools
        return variables


class AnswersRequest(Body):
    """Body of `/live/answers`: answers of a person to the questions of the diagnosis, by fact."""

    answers: dict[str, str | float | bool | None] = Field(max_length=MAX_FIELDS)


class TokenizeRequest(Body):
    """Body of `/tokenize`: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
