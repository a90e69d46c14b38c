"""`forerun audit`: does speculation change the text of a server?"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, UseAppendAction, arg

from forerun.cli.command import Command, Exit
from forerun.cli.flags import check_writable
from forerun.cli.tables import SafeConsole, progress_bar
from forerun.client.urls import is_url
from forerun.errors import InvalidRequest

if TYPE_CHECKING:
    from forerun.doctor.audit.run import Audit
    from forerun.doctor.audit.verdict import AuditVerdict

_CODES = {"no_deviation": Exit.GOOD, "deviates": Exit.PROBLEM, "cannot_judge": Exit.INSUFFICIENT}


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """Options of `forerun audit`."""

    url: Annotated[Positional[str], arg(metavar="URL")]
    """Address of a server with the OpenAI API, such as http://localhost:8000/v1."""
    reference: str | None = None
    """What the text is compared with: a model (name or folder), which is the strongest test, the
    URL of a server with the same model and without speculation, or "self": the server reads every
    text again in one pass, without speculation and cache. Default: self, where the server reports
    log-probabilities of what it reads, else those of its answers."""
    draft: str | None = None
    """The draft model of the server: faults are named more sharply. Needs a --reference model."""
    model: str | None = None
    """Name of the model on the server. Default: the first one that it lists."""
    api_key_env: UseAppendAction[tuple[str, ...]] = ()
    """Environment variable with the API key; with two servers, one for each.
    Default: OPENAI_API_KEY, if it is set."""
    prompts: Path | None = None
    """Texts to continue: .jsonl with "prompt" or "messages", else one a line or between "---".
    Records of a .jsonl may have sampling parameters; then all requests have such parameters."""
    tokens: int = 20_000
    """Most output tokens in all."""
    requests: int = 2_000
    """Most requests, refused ones included."""
    max_tokens: int = 48
    """Output tokens of most requests; some are for up to 512, a fortieth of all at most."""
    false_alarms: float = 0.01
    """Largest probability of an alarm over a server that follows the reference."""
    tie_margin: float = 0.5
    """At temperature 0, a token this close to the best one, in log-probability, is rounding. With
    0.1, where server and reference compute in fp32, faults are found sooner."""
    state: Path | None = None
    """File that records every question and answer; an interrupted audit continues from it."""
    json: bool = False
    """Print one JSON object."""


def run(options: AuditOptions) -> int:
    """Audit a server and show the verdict."""
    from forerun.doctor.audit.config import AuditConfig
    from forerun.doctor.audit.prepare import AuditSource, prepare_audit, read_kinds

    if options.draft is not None and (
        options.reference in (None, "self") or is_url(options.reference or "")
    ):
        raise InvalidRequest("--draft needs the model of the server as --reference")
    config = AuditConfig(
        max_tokens=options.tokens,
        max_requests=options.requests,
        num_tokens=options.max_tokens,
        false_alarms=options.false_alarms,
        tie_margin=options.tie_margin,
        kinds=read_kinds(options.prompts),
    )
    config.check_enough()
    check_writable("--state", options.state)
    with ExitStack() as stack:
        audit = prepare_audit(
            AuditSource(
                url=options.url,
                reference=options.reference,
                draft=options.draft,
                model=options.model,
                key_variables=options.api_key_env,
                prompts=options.prompts,
                state=options.state,
            ),
            config,
            stack,
        )
        with progress_bar("asking", config.max_tokens) as report:
            audit.run(report)
    from forerun.doctor.audit.verdict import judge, report_of

    verdict = judge(audit)
    if options.json:
        print(json.dumps(report_of(audit, verdict)))
    else:
        _show(audit, verdict)
    return _CODES[verdict.status]


def _show(audit: Audit, verdict: AuditVerdict) -> None:
    from forerun.doctor.audit.verdict import spent_in_words

    console = SafeConsole(soft_wrap=True)
    console.print(verdict.sentence, style="bold", markup=False)
    for line in (*verdict.reasons, spent_in_words(audit), *verdict.notes):
        console.print(f"  {line}", markup=False)
    for line in verdict.untested:
        console.print(f"  not tested: {line}", markup=False)


COMMAND = Command(
    options=AuditOptions,
    run=run,
    has_positional=True,
    lists={"--api-key-env": ","},
    description="Test whether speculation changes the text of a server with the OpenAI API, and\n"
    "name the fault. Sampled tokens are compared with the distributions they should follow, and\n"
    "after a deviation with tokens made without speculation. Exit code 0: no deviation, 3: a\n"
    "deviation, 4: the server gives too little to judge.",
    examples=(
        "forerun audit http://localhost:8000/v1 --reference zoo:code-40m",
        "forerun audit http://localhost:8000/v1 --reference path/to/model --draft path/to/draft",
        "forerun audit http://localhost:8000/v1 --reference http://localhost:8001/v1 "
        "--json > audit.json",
        "forerun audit http://localhost:8000/v1 --state audit.jsonl --tokens 50000",
    ),
)
