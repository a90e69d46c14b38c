"""The trace schema: one header, one record per request, and one per request and step.

Plain values with a JSON-ready `to_dict`; reading and writing files happens elsewhere. They are
msgspec structs because a step creates one per sequence: a frozen dataclass of this size takes about
ten times as long.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import asdict

SCHEMA_VERSION = 1

if TYPE_CHECKING:
    Json = (
        None | bool | int | float | str | tuple["Json", ...] | list["Json"] | Mapping[str, "Json"]
    )
else:
    Json = Any  # msgspec does not resolve types that contain themselves

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
"""Larger integers have no exact float."""
NumNodes = Annotated[int, Meta(ge=0, le=4096)]
"""Draft tokens of one step; the widest drafters propose some hundred."""
Seconds = Annotated[float, Meta(ge=0.0, le=1e12)]
"""At most 30,000 years."""
Prob = Annotated[float, Meta(ge=0.0, le=1.001)]
"""Probabilities summed in fp32 over a vocabulary may be rounded up."""


class TraceHeader(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="record", tag="header"
):
    """Describes the models and versions that the steps of a trace were run with.

    Attributes:
        target: name or path of the target.
        target_hash: hash of the target's weights.
        draft: name or path of the draft, None without one.
        draft_hash: hash of the draft's weights, None without one.
        tokenizer_hash: hash of the mapping from ids to token bytes.
        device: the target's device, in words.
        versions: package name to version: forerun, torch, transformers, python.
        controller: name of the controller that chose what is drafted; None where it is not known,
            or not the same in all requests.
    """

    target: str
    target_hash: str
    draft: str | None
    draft_hash: str | None
    tokenizer_hash: str
    device: str
    versions: dict[str, str]
    controller: str | None = None
    schema_version: int = SCHEMA_VERSION

    def to_dict(self) -> dict[str, Json]:
        return asdict(self)


class RequestRecord(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="record", tag="request"
):
    """Describes one finished request.

    Attributes:
        parameters: its sampling parameters by name.
        tags: free-form labels, such as language, template or tenant.
        num_output_tokens: emitted tokens, after stop truncation.
        ttft_s: from arrival to the first token, waiting included; None where none came.
        prefill_s: from joining the batch to the first token; None where none came.
        finish_reason: "stop", "length", "deadline" or "abort".
        prompt_token_ids: the prompt, None unless token tracing is on.
    """

    request_id: str
    parameters: dict[str, Json]
    tags: tuple[str, ...] = ()
    num_prompt_tokens: Count
    num_output_tokens: Count
    ttft_s: Seconds | None
    prefill_s: Seconds | None
    finish_reason: str
    prompt_token_ids: tuple[int, ...] | None = None

    def to_dict(self) -> dict[str, Json]:
        return asdict(self)


class StepRecord(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="record", tag="step"
):
    """Describes one request in one step.

    Durations, `batch_rows` and `num_prefill_rows` belong to the cycle, which all requests of a
    batch share: records with the same `cycle_id` repeat them, and count each cycle once when
    adding them up.

    Attributes:
        t_s: monotonic time at the start of the cycle.
        step: index of this step within the request.
        method: name of the drafter, or "plain".
        k_budget: K the controller allowed; the nodes of a tree.
        depth_drafted: depth of the deepest node; equals `num_drafted` for a chain.
        num_emitted: accepted plus one, fewer where a stop cut the text.
        verify_s: the target pass, until its logits are there.
        other_s: everything else in the cycle, verification included.
        batch_rows: rows of the target pass over all requests.
        num_prefill_rows: those of them that fed prompts.
        context_tokens: committed tokens of the request at the start of the step.
        last_token_source: "accepted" (a stop cut the text there), "recovered", "bonus" or "plain",
            without a draft; older traces call that "bonus".
        expected_accepted: E[num_accepted | proposal, target] under the verifier in use.
        acceptance_probability: mean over verified positions of sum(min(target, draft)); None where
            the draft has no probabilities or the figure was not asked for.
        stop_reason: why drafting ended: "budget" of the plan, or the drafter's own reason.
        path_ranks: of every accepted node, its place among its siblings from 1 on, which names the
            accepted path; None where no tree was planned.
        path_children: how many children were drafted below the last committed token and below each
            accepted node; None where no tree was planned.
        drafter_hash: content hash of the drafter, None for plain decoding.
        graph_hit: whether the pass replayed a captured graph; None where there are none.
        token_ids: emitted tokens, None unless token tracing is on.
        rule: name of the verifier; this and the next two None unless probabilities are traced.
        target_probs: of every drafted token, the target's probability after its path, under the
            request's parameters; where the argmax decides (rule "greedy"), before them. None where
            penalties or a mask apply.
        draft_probs: of every drafted token, the probability it was drawn with; None where it was
            not drawn.
    """

    cycle_id: Count
    t_s: Annotated[float, Meta(ge=-1e12, le=1e12)]
    request_id: str
    step: Count
    method: str
    k_budget: NumNodes
    num_drafted: NumNodes
    depth_drafted: NumNodes
    num_accepted: NumNodes
    num_emitted: NumNodes
    draft_s: Seconds
    verify_s: Seconds
    other_s: Seconds
    batch_rows: Count
    num_prefill_rows: Count
    context_tokens: Count
    last_token_source: str
    expected_accepted: Annotated[float, Meta(ge=0.0, le=4096.0)]
    acceptance_probability: float | None = None
    stop_reason: str | None = None
    path_ranks: tuple[int, ...] | None = None
    path_children: tuple[int, ...] | None = None
    drafter_hash: str | None = None
    graph_hit: bool | None = None
    token_ids: tuple[int, ...] | None = None
    rule: str | None = None
    target_probs: tuple[Prob, ...] | None = None
    draft_probs: tuple[Prob, ...] | None = None

    @property
    def cycle_s(self) -> float:
        """Seconds of the whole cycle."""
        return self.draft_s + self.verify_s + self.other_s

    def to_dict(self) -> dict[str, Json]:
        return asdict(self)
