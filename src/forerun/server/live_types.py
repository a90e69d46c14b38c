"""JSON schema of `/live`, the present state of a server for the live page and other clients.

All durations are in seconds and all rates per second. An age is counted back from the moment of
the snapshot, so that a reader needs no clock in common with the server. A figure that was not
measured is null; it is never zero instead.
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = [
    "LiveCause",
    "LiveDiagnosis",
    "LiveEstimate",
    "LiveLoad",
    "LivePiece",
    "LivePoint",
    "LivePosition",
    "LiveRequest",
    "LiveSetup",
    "LiveSnapshot",
    "LiveStepTimes",
    "LiveTotals",
]

Origin = Literal["prompt", "accepted", "recovered", "bonus", "plain"]
"""Where a token came from; "plain" stands for a token of a step without a draft."""


class LiveEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """A measured figure with its 95% interval."""

    value: float
    low: float
    high: float


class LiveSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Models, drafters and settings of the engine that the server runs.

    Attributes:
        engine: its name, "forerun" or "vllm".
        version: of the engine.
        target: name of the target model.
        methods: names of the drafters; empty where decoding is plain.
        max_context: prompt plus output tokens of one sequence.
    """

    engine: str
    version: str
    target: str
    methods: tuple[str, ...]
    max_context: int | None


class LiveTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the server was started: target passes, draft nodes, accepted nodes, tokens."""

    num_steps: int
    num_drafted: int
    num_accepted: int
    num_emitted: int


class LiveLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Sequences and KV in use at the moment of the snapshot, with their limits if known."""

    num_running: int
    num_waiting: int
    max_running: int | None = None
    max_waiting: int | None = None
    num_kv_tokens: int | None = None
    max_kv_tokens: int | None = None
    kv_share: float | None = None


class LivePosition(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one draft position: steps that drafted it, and steps that accepted through it."""

    position: int
    num_drafted: int
    num_accepted: int


class LiveStepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Mean durations of the decode steps of one kind; steps that read prompts are left out.

    Attributes:
        num_steps: how many were measured.
        num_sequences: mean sequences in the batch.
        draft_s: drafting.
        verify_s: the target pass.
        other_s: everything else, verification included.
        num_emitted: mean tokens of all sequences per step.
    """

    num_steps: int
    num_sequences: float
    draft_s: float
    verify_s: float
    other_s: float
    num_emitted: float


class LivePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one second in which tokens were emitted.

    Attributes:
        age_s: how long ago the second began.
        tokens_per_s: emitted in it.
        num_running: mean sequences per step.
        acceptance_length: tau of its drafting steps.
        num_speculative_tokens: mean K of the plans, plain ones counted as 0.
        speedup: time of plain decoding for the same tokens over the time of the steps.
        methods: steps of requests by drafter; "plain" for those without a draft.
    """

    age_s: float
    tokens_per_s: float
    num_running: float
    acceptance_length: float | None
    num_speculative_tokens: float | None
    speedup: float | None
    methods: dict[str, int]


class LivePiece(msgspec.Struct, frozen=True, kw_only=True):
    """Text of consecutive tokens that have the same source."""

    text: str
    origin: Origin


class LiveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One of the latest requests.

    Attributes:
        request_id: name of the sample.
        state: "reading" its prompt, "decoding", or the reason of its end.
        age_s: since it arrived.
        num_prompt_tokens: prompt length.
        num_output_tokens: emitted.
        num_drafted: draft nodes verified for it.
        acceptance_length: tau over its steps; None before the first.
        draft_acceptance_rate: accepted over drafted nodes; None without drafts.
        ttft_s: from arrival to the first token.
        tokens_per_s: after the first token.
        pieces: the end of the prompt and the output by origin; empty where texts are not shown.
    """

    request_id: str
    state: str
    age_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_drafted: int
    acceptance_length: float | None
    draft_acceptance_rate: float | None
    ttft_s: float | None
    tokens_per_s: float | None
    pieces: tuple[LivePiece, ...]


class LiveCause(msgspec.Struct, frozen=True, kw_only=True):
    """A likely cause of slow decoding, with its score and an explanation."""

    label: str
    score: float
    what: str


class LiveDiagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `forerun diagnose` over the latest steps.

    Attributes:
        verdict: "healthy", "problem" or "insufficient evidence".
        headline: the verdict in one sentence.
        causes: the likeliest first.
        changes: what to change, with the predicted gain.
        num_steps: steps of requests that it rests on.
    """

    verdict: str
    headline: str
    causes: tuple[LiveCause, ...]
    changes: tuple[str, ...]
    num_steps: int


class LiveSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the live page shows.

    Attributes:
        uptime_s: since the view was made.
        window_s: seconds with activity that the figures below cover.
        setup: the engine.
        totals: counts since the start.
        load: queue and KV.
        tokens_per_s: emitted per second over the last ten seconds; 0 where nothing ran.
        speedup: time of plain decoding for the same tokens over the time of the decode steps.
        num_plain_steps: plain steps that the speedup's baseline rests on.
        acceptance_length: tau of the drafting steps.
        positions: acceptance by position.
        drafting_step: mean times of steps with a draft.
        plain_step: mean times of steps without one.
        history: the latest seconds with activity, the oldest first.
        requests: the latest ones, the newest first.
        shows_texts: whether requests carry their text.
        diagnosis: None before there were enough steps.
        schema_version: of this structure.
    """

    uptime_s: float
    window_s: float
    setup: LiveSetup
    totals: LiveTotals
    load: LiveLoad
    tokens_per_s: float
    speedup: LiveEstimate | None
    num_plain_steps: int
    acceptance_length: float | None
    positions: tuple[LivePosition, ...]
    drafting_step: LiveStepTimes | None
    plain_step: LiveStepTimes | None
    history: tuple[LivePoint, ...]
    requests: tuple[LiveRequest, ...]
    shows_texts: bool
    diagnosis: LiveDiagnosis | None
    schema_version: int = 1
