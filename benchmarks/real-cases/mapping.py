"""From a case to evidence: what was known before the fix, by rules that are the same for all.

A case is an object with `engine`, `symptom`, `evidence` and `raw_log_lines`. Its cause, the figures
after the fix, and lines that quote them are not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from forerun.doctor.evidence import Evidence

Case = Mapping[str, object]

FIELDS = {
    "acceptance_rate": "draft_acceptance_rate",
    "acceptance_length": "acceptance_length",
    "per_position_rates": "acceptance_rate_per_position",
    "K": "k",
    "batch_or_concurrency": "batch",
    "tok_s_with": "tokens_per_s",
    "tok_s_without": "tokens_per_s_plain",
    "context": "context_tokens",
    "target": "target_name",
    "draft": "draft_name",
}
OTHER = {
    "target_vocab": "target_vocab_size",
    "draft_vocab": "draft_vocab_size",
    "train_acc": "training_accuracy",
    "n_drafted": "num_drafted",
    "n_accept": "num_accepted",
    "accepted": "num_accepted",
    "drafted": "num_drafted",
    "previous_tok_s": "tokens_per_s_before",
    "ttft_with": "ttft_s",
    "ttft_without": "ttft_s_plain",
    "draft_max_position_embeddings": "draft_max_context",
    "draft_s_per_token": "draft_token_s",
}
METHODS = (
    ("ngram", "ngram"),
    ("suffix", "ngram"),
    ("lookup", "ngram"),
    ("mtp", "mtp"),
    ("nextn", "mtp"),
    ("eagle", "eagle"),
    ("dflash", "block"),
    ("dspark", "block"),
    ("pard", "block"),
    ("draft", "draft_model"),
    ("medusa", "other"),
)
AFTER = re.compile(r"after|fix|patched|this pr|proposed|with pr", re.IGNORECASE)
NUMBER = re.compile(r"\d+(?:\.\d+)?")
WINDOW = re.compile(r"max_position_embeddings ?= ?(\d+)|(?:window|trained (?:on|for)) (\d{3,6})")
BEYOND = re.compile(r"> ?(\d{3,6})|above (\d{1,3})k\b|beyond (\d{3,6})")


def say(evidence: Evidence, name: str, value: object, source: str) -> None:
    """A fact, unless it is none: fields of cases are written by hand."""
    try:
        evidence.add(name, value, source)
    except ValueError:
        return


def facts_of(known: Case, other: Case) -> Iterator[tuple[str, object]]:
    """Fields under our names."""
    for field, name in FIELDS.items():
        if known.get(field) is not None:
            yield name, known[field]
    for field, name in OTHER.items():
        if other.get(field) is not None:
            yield name, other[field]
    yield from run_facts(known, other)
    everything = f"{known.get('draft')} {other}"
    if window := WINDOW.search(everything):
        yield "draft_max_context", next(filter(None, window.groups()))
        if beyond := BEYOND.search(everything):
            plain, thousands, words = beyond.groups()
            yield "context_tokens", (int(plain or words or 0) or 1000 * int(thousands or 0)) + 1
    yield from dtypes_of(other)


def run_facts(known: Case, other: Case) -> Iterator[tuple[str, object]]:
    """Method, sampling, and figures that take two fields."""
    if isinstance(milliseconds := other.get("draft_ms_per_token"), int | float):
        yield "draft_token_s", milliseconds / 1000.0
    method = str(known.get("method") or "").lower()
    yield from (("method", name) for word, name in METHODS if word in method)
    sampling = known.get("sampling")
    if isinstance(sampling, Mapping):
        for name in ("temperature", "top_p", "top_k"):
            if sampling.get(name) is not None:
                yield name, sampling[name]
    if other.get("independent_tool_tok_s") and known.get("tok_s_with"):
        yield "tokens_per_s_server", other["independent_tool_tok_s"]
        yield "tokens_per_s_client", known["tok_s_with"]


def dtypes_of(other: Case) -> Iterator[tuple[str, object]]:
    """A draft law in one precision and its test in another."""
    dtypes = {name: str(value) for name, value in other.items() if name.endswith("dtype")}
    drafts = {value for name, value in dtypes.items() if "draft" in name or "sampling" in name}
    tests = {v for n, v in dtypes.items() if any(w in n for w in ("reject", "verif", "accept"))}
    if drafts and tests and drafts.isdisjoint(tests):
        yield "draft_probs_differ", True


def add_contrasts(evidence: Evidence, known: Case, other: Case) -> None:
    """What else was measured: other conditions, with and without speculation, other K."""
    conditions = {n: v for n, v in other.items() if isinstance(v, Mapping) and not AFTER.search(n)}
    add_pairs(evidence, conditions)
    rate = evidence.number("draft_acceptance_rate")
    for name, values in conditions.items():
        found = values.get("acceptance_rate")
        if isinstance(found, int | float) and rate is not None and found > max(2 * rate, 0.2):
            say(evidence, "reference_acceptance_rate", found, f"measured under {name}")
            say(evidence, "acceptance_differs_by_backend", True, f"measured under {name}")
    speed = evidence.number("tokens_per_s")
    deeper = [
        float(values["tok_s"])
        for name, values in other.items()
        if isinstance(values, Mapping) and re.search(r"\d", name)
        if isinstance(values.get("tok_s"), int | float) and "al" in values
        if isinstance(values.get("al"), int | float)
        and values["al"] > (known.get("acceptance_length") or 99)
    ]
    if speed and deeper and max(deeper) > 1.05 * speed:
        say(evidence, "faster_with_k", True, "rates at larger K")
    rates = [v for n, v in other.items() if "cache" in n or "dtype" in n if isinstance(v, float)]
    if rate is not None and any(value > rate + 0.3 for value in rates):
        say(evidence, "acceptance_differs_by_precision", True, "acceptance by precision")
    hits = other.get("prefix_hit_rate")
    if isinstance(hits, Mapping) and isinstance(hits.get("no_spec"), float):
        with_spec = hits.get("spec")
        values = with_spec if isinstance(with_spec, list) else [with_spec]
        say(evidence, "prefix_hit_rate_plain", hits["no_spec"], "case fields")
        say(
            evidence,
            "prefix_hit_rate",
            max(v for v in values if isinstance(v, float)),
            "case fields",
        )
    gains = [str(v) for n, v in other.items() if "time_vs_no_spec" in n]
    if any(gain.startswith("+") for gain in gains):
        say(evidence, "slower_than_plain", True, "time against no speculation")


def add_pairs(evidence: Evidence, conditions: Mapping[str, Mapping[str, object]]) -> None:
    """Speedups under named conditions; which one they depend on, the names say."""
    speedups = {
        name: float(values["with"]) / float(values["without"])
        for name, values in conditions.items()
        if isinstance(values.get("with"), int | float)
        if isinstance(values.get("without"), int | float) and values["without"]
    }
    kinds = {
        "slower_with_tensor_parallel": r"^tp_?(\d+)$",
        "slower_with_batch": r"^(?:bs|batch|c|conc\w*)_?(\d+)$",
        "slower_with_context": r"^(?:ctx|context|isl)_?(\d+)",
    }
    for fact, pattern in kinds.items():
        sized = sorted(
            (int(found.group(1)), gain)
            for name, gain in speedups.items()
            if (found := re.match(pattern, name.lower()))
        )
        for (_, small), (_, large) in combinations(sized, 2):
            if large < 0.9 * small:
                say(evidence, fact, True, "speedups by condition")


def after_values(known: Case, other: Case) -> frozenset[str]:
    """Numbers that were measured after the fix."""
    found: list[object] = [known.get("tok_s_after_fix")]
    found += [value for name, value in other.items() if AFTER.search(name)]
    return frozenset(NUMBER.findall(str(found)))


def lines_before(case: Case, after: frozenset[str]) -> list[str]:
    """Log lines, without those that quote the time after the fix."""
    lines = case.get("raw_log_lines")
    kept = []
    for line in lines if isinstance(lines, Sequence) and not isinstance(lines, str) else ():
        numbers = {f"{float(n):g}" for n in NUMBER.findall(str(line))}
        quoted = numbers & {f"{float(n):g}" for n in after if "." in n}
        if not quoted and not AFTER.search(str(line)):
            kept.append(str(line))
    return kept
