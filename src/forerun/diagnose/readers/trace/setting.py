"""Facts about the setting of a trace: models, versions, sampling parameters, prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from forerun.diagnose.evidence import MAX_WORD, Evidence
from forerun.theory.record import RequestRecord, TraceHeader
from forerun.theory.text import ngrams

__all__ = ["add_asked", "add_setup", "add_texts"]

METHODS = {"draft_model": "draft_model", "suffix": "ngram"}
"""Ours under the names of the vocabulary."""
MIN_PROMPT_TOKENS = 200
"""Fewer prompt tokens do not tell a text from a list of random ids."""
COMMON = 10
"""The ten commonest tokens are a good part of any text, and next to nothing of random ids."""


def add_setup(
    evidence: Evidence, headers: Sequence[TraceHeader], methods: Mapping[str, int], source: str
) -> None:
    """Add models, versions and methods from the headers, and what changed between them.

    Args:
        evidence: takes the facts.
        headers: of the trace, in order.
        methods: drafting steps by drafter.
        source: name of the trace.
    """
    if not headers:
        return
    evidence.conclude("engine", "forerun", source)
    for name, values in (
        ("target_name", {header.target for header in headers}),
        ("draft_name", {header.draft for header in headers}),
        ("target_hash", {header.target_hash for header in headers}),
        ("draft_hash", {header.draft_hash for header in headers}),
        ("engine_version", {header.versions.get("forerun") for header in headers}),
        ("device", {header.device for header in headers}),
    ):
        value = values.pop() if len(values) == 1 else None
        if value is not None and len(value) <= MAX_WORD:
            evidence.conclude(name, value, source)
    add_change(evidence, headers, source)
    if methods:
        most = max(methods, key=lambda method: methods[method])
        evidence.conclude("method", METHODS.get(most, "other"), source)


def add_change(evidence: Evidence, headers: Sequence[TraceHeader], source: str) -> None:
    """Add the one thing that changed during the trace; nothing for a comparison of several arms."""
    drafts = {header.draft_hash for header in headers}
    targets = {header.target_hash for header in headers}
    if len(targets) == 2 and len(drafts) == 1:
        evidence.conclude(
            "changed", ["target"], f"{source}: its headers name two targets, one draft"
        )


def add_asked(evidence: Evidence, requests: Sequence[RequestRecord], source: str) -> None:
    """Add the verification method, where all requests agree, and facts about the prompts."""
    rules = {
        (r.parameters.get("verification"), r.parameters.get("draft_temperature"))
        for r in requests
        if r.parameters.get("temperature") != 0
    }
    if len(rules) == 1 and "draft_model" in evidence.words("method"):
        rule, draft_temperature = rules.pop()
        evidence.conclude("draft_one_hot", draft_temperature == 0, f"{source}: draft_temperature")
        if rule in ("walk", "block", "token"):
            evidence.conclude("exact_match_rule", rule == "walk", f"{source}: verification {rule}")
    add_prompts(evidence, requests, source)


def add_prompts(evidence: Evidence, requests: Sequence[RequestRecord], source: str) -> None:
    """Add whether prompts are random tokens, where the trace has them."""
    counts: Counter[int] = Counter()
    for request in requests:
        counts.update(request.prompt_token_ids or ())
    total = counts.total()
    if total < MIN_PROMPT_TOKENS:
        return
    share = sum(count for _, count in counts.most_common(COMMON)) / total
    answer = True if share < 0.05 else False if share > 0.12 else None
    evidence.conclude(
        "random_prompts", answer, f"{source}: {share:.0%} of prompts are {COMMON} tokens"
    )


GRAM = 4
MIN_GRAMS = 200
"""Fewer 4-grams say nothing of how repetitive a text is."""


def add_texts(evidence: Evidence, texts: Iterable[Sequence[int]], source: str) -> None:
    """Add how repetitive the outputs are, where the trace has their tokens."""
    total = distinct = 0
    for text in texts:
        grams = [*ngrams(text, GRAM)]
        total += len(grams)
        distinct += len(set(grams))
    if total >= MIN_GRAMS:
        evidence.conclude("distinct_4gram_share", distinct / total, f"{source}: of {total} 4-grams")
