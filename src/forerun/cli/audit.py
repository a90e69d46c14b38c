"""`forerun audit`: does speculation change the text of a server?"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, UseAppendAction, arg

from forerun.cli.command import Command, Exit
from forerun.cli.flags import check_writable
from forerun.cli.tables import SafeConsole, progress_bar
from forerun.client.urls import is_url, shown_source, shown_url
from forerun.errors import InvalidRequest, UnreadableInput
from forerun.terminal_text import write_count

if TYPE_CHECKING:
    from forerun.doctor.audit.config import AuditConfig, Kind
    from forerun.doctor.audit.endpoint import HttpEndpoint
    from forerun.doctor.audit.rounds import Chat, Prompt
    from forerun.doctor.audit.run import Audit
    from forerun.doctor.audit.verdict import AuditVerdict

_MOST_PROMPTS, _JOINED_EVERY, _NUM_JOINED = 400, 10, 6
"""Most prompts; of the shipped ones, one in ten is several of them, one after the other."""
_NUM_CHATS = 20
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
        kinds=_read_kinds(options.prompts),
    )
    config.check_enough()
    check_writable("--state", options.state)
    with ExitStack() as stack:
        audit = _prepare_audit(options, config, stack)
        with progress_bar("asking", config.max_tokens) as report:
            audit.run(report)
    from forerun.doctor.audit.verdict import judge, report_of

    verdict = judge(audit)
    if options.json:
        print(json.dumps(report_of(audit, verdict)))
    else:
        _show(audit, verdict)
    return _CODES[verdict.status]


def _prepare_audit(options: AuditOptions, config: AuditConfig, stack: ExitStack) -> Audit:
    from forerun.client.connection import ClientConfig
    from forerun.doctor.audit.endpoint import HttpEndpoint
    from forerun.doctor.audit.records import StateFile
    from forerun.doctor.audit.reference import Reference, ReportedLogprobs, load_reference
    from forerun.doctor.audit.run import Audit

    name, keys = options.reference, options.api_key_env
    is_model = name is not None and name != "self" and not is_url(name)
    control = None
    if name is not None and is_url(name):
        control = ClientConfig(url=name, key_variable=keys[-1] if keys else None)
    server = ClientConfig(
        url=options.url, model=options.model, key_variable=keys[0] if keys else None
    )
    endpoint = HttpEndpoint(
        server, control, wants_logprobs=not is_model, num_clients=config.num_clients
    )
    stack.callback(endpoint.close)
    texts, messages = _read_prompts(options.prompts)
    reference: Reference = ReportedLogprobs()
    encode: Callable[[str], tuple[int, ...] | None] = endpoint.tokenize
    if is_model:
        assert name is not None
        longest = max(map(len, (*texts, *messages)))  # a token has a character or more
        needed = min(longest + 2 * config.longest, endpoint.max_context or 1 << 20)
        loaded = load_reference(name, options.draft, max_context=needed)
        endpoint.ids_by_text = loaded.ids_by_text
        tokenizer, reference = loaded.tokenizer, loaded
        if tokenizer is not None:
            encode = lambda text: tuple(tokenizer.encode(text))  # noqa: E731
    prompts = encode_prompts(texts, encode, endpoint.max_context, config)
    if not is_model and not isinstance(prompts[0], str):
        endpoint.find_scoring(prompts[0])
    if name == "self" and not endpoint.scores:
        raise InvalidRequest(
            "--reference self: the server reports no log-probabilities of texts that it reads, or "
            "no token ids (/tokenize); name a model or a second server"
        )
    chats = find_chats(endpoint, messages)
    header = {
        "url": shown_url(options.url),
        "reference": shown_source(name or ""),
        "draft": options.draft or "",
    }
    state = StateFile(options.state, header)
    return Audit(config, endpoint, reference, [*prompts, *chats], state)


def _read_kinds(path: Path | None) -> tuple[Kind, ...]:
    """Return the kinds of request that a prompt file has parameters of, or the default ones."""
    from forerun.bounded_read import json_lines
    from forerun.doctor.audit.config import KINDS, kinds_of
    from forerun.measure.prompt_files import STREAM

    if path is None or path.suffix != ".jsonl" or path.is_dir():
        return KINDS
    try:
        rows = [row for _, row in islice(json_lines(path, STREAM), _MOST_PROMPTS)]
    except UnreadableInput as error:
        raise InvalidRequest(f"--prompts: {error}") from error
    except OSError as error:
        raise InvalidRequest(f"--prompts {path} cannot be read: {error}") from error
    return kinds_of(row for row in rows if isinstance(row, dict))


def _read_prompts(path: Path | None) -> tuple[list[str], list[str]]:
    """Return the texts to continue, and the messages to answer."""
    from forerun.measure.prompt_files import read_entries
    from forerun.models.catalog import chat_prompts, held_out_prompts

    if path is None:
        texts = [prompt.text for prompt in held_out_prompts()]
        for place in range(0, len(texts), _JOINED_EVERY):
            texts[place] = "\n".join(texts[place : place + _NUM_JOINED])
        return texts, [prompt.text for prompt in chat_prompts()][:_NUM_CHATS]
    entries = [*islice(read_entries(path), _MOST_PROMPTS)]
    texts = [entry.text for entry in entries if entry.text]
    messages = [e.messages[0]["content"] for e in entries if e.messages]
    if not texts and not messages:
        raise InvalidRequest(f"--prompts {path} has no text to continue")
    return texts or messages, messages[:_NUM_CHATS]


def find_chats(endpoint: HttpEndpoint, messages: Sequence[str]) -> list[Chat]:
    """Return messages with their prompts; where one is refused, no more are tried."""
    from forerun.doctor.audit.rounds import Chat

    found: list[Chat] = []
    for text in messages:
        ids = endpoint.tokenize(text, is_message=True)
        if not ids:
            break
        found.append(Chat(message=text, ids=ids))
    return found


def encode_prompts(
    texts: Sequence[str],
    encode: Callable[[str], tuple[int, ...] | None],
    max_context: int | None,
    config: AuditConfig,
) -> list[Prompt]:
    """Return the ids of prompts, or their texts if ids are unknown; says which ones are cut."""
    found: list[Prompt] = []
    # A text is scored with room for one more token.
    most = None if max_context is None else max(1, max_context - config.num_tokens - 1)
    num_cut = 0
    for text in texts:
        ids = encode(text)
        if ids is None:
            return [*texts]
        num_cut += most is not None and len(ids) > most
        found.append(ids[:most])
    if num_cut:
        print(
            f"{write_count(num_cut, 'prompt')} cut to {most} tokens: the server's context holds "
            f"{max_context}",
            file=sys.stderr,
        )
    return found


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
