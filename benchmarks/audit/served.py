"""Audits over HTTP of zoo:code-40m with its draft: one with a planted fault, or many without.

    python -m benchmarks.audit.served one                    # healthy
    python -m benchmarks.audit.served one --lenient          # acceptance compares with half of u
    python -m benchmarks.audit.served clean --seeds 0-59     # false alarms of our server
    python -m benchmarks.audit.served silent --seeds 0-19    # our server without a draft
    python -m benchmarks.audit.served self --seeds 0-9       # the server itself as the reference
    python -m benchmarks.audit.served clean --url http://127.0.0.1:8080/v1 --label llama.cpp-f32-K4

All but "one" append a row per audit to results/served.jsonl; seeds that are there are skipped. Our
server differs from seed to seed in precision, K, batch and prefix cache. The server behind --url
has to serve the same weights, and to sample without top-k and min-p by default.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.audit.run import add_rows, row_of, seeds_of
from tests.lab.audited import Rule, lenient, plant
from tests.server.conftest import serving

from forerun.cli.main import main as forerun
from forerun.client.connection import ClientConfig
from forerun.doctor.audit.config import AuditConfig
from forerun.doctor.audit.endpoint import HttpEndpoint
from forerun.doctor.audit.records import StateFile
from forerun.doctor.audit.reference import (
    Reference,
    ReferenceModel,
    ReportedLogprobs,
    load_reference,
)
from forerun.doctor.audit.run import Audit
from forerun.doctor.audit.verdict import judge
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.loading import load_pair_member
from forerun.models.architecture import WeightFormat
from forerun.models.catalog import held_out_prompts

TARGET, DRAFT = "zoo:code-40m", "zoo:code-2m-for-40m"
RESULTS = Path(__file__).parent / "results/served.jsonl"
MAX_CONTEXT = 512
SETTINGS: tuple[dict[str, Any], ...] = tuple(
    {
        "dtype": "float32" if kind == "float32" else "bfloat16",
        "weights": "int8" if kind == "int8" else "auto",
        "num_speculative_tokens": k,
        "max_batch": batch,
        "num_kept": kept,
    }
    for kind, k, batch, kept in (
        ("bfloat16", 4, 4, 0),
        ("float32", 2, 1, 0),
        ("int8", 4, 4, 8),
        ("bfloat16", 8, 8, 8),
        ("float32", 4, 4, 8),
        ("int8", 8, 8, 0),
        ("bfloat16", 1, 2, 8),
        ("float32", 8, 8, 0),
        ("int8", 2, 1, 0),
    )
)
"""Settings of our servers; seed n takes the one at n modulo their number. int8 weights are compared
with the same int8 weights: they are another model than the stored ones."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["one", "clean", "silent", "self"])
    parser.add_argument("--lenient", action="store_true")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", default="0-5")
    parser.add_argument("--seconds", type=float, default=300.0, help="stop before the next audit")
    parser.add_argument("--url", help="of a server that runs already")
    parser.add_argument("--label", help="default: what is run")
    options = parser.parse_args()
    if options.what == "one":
        one(options.tokens, options.out, is_lenient=options.lenient)
    else:
        audit_all(options)


def one(max_tokens: int, out: Path | None, *, is_lenient: bool) -> None:
    """Audit our server once, as a user does."""
    engine = loaded(SETTINGS[0])
    if is_lenient:
        plant(engine, Rule(accepts=lenient))
    with serving(engine) as client:
        flags = ["--reference", TARGET, "--draft", DRAFT, "--tokens", str(max_tokens)]
        flags += ["--out", str(out)] if out else []
        forerun(["audit", str(client.base_url), *flags])


def audit_all(options: argparse.Namespace) -> None:
    """Audit servers without a fault, and add a row each."""
    path = RESULTS if options.out is None else options.out
    label = options.label or f"forerun, {options.what}"
    runs = (
        (label, seed, partial(audited, options.url, seed, options.tokens, options.what))
        for seed in seeds_of(options.seeds)
    )
    add_rows(path, runs, options.seconds)


@contextlib.contextmanager
def server_of(url: str | None, seed: int, what: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Address and settings of the server that a seed audits."""
    if url is not None:
        yield url, {}
        return
    settings = SETTINGS[seed % len(SETTINGS)]
    with serving(loaded(settings, None if what == "silent" else DRAFT)) as client:
        yield f"{client.base_url}", settings


def loaded(settings: dict[str, Any], draft: str | None = DRAFT) -> Engine:
    config = EngineConfig(
        max_context=MAX_CONTEXT,
        controller="fixed",
        **{name: value for name, value in settings.items() if name != "dtype"},
    )
    return Engine.load(TARGET, draft, dtype=settings["dtype"], config=config)


@cache
def reference_of(weights: WeightFormat) -> ReferenceModel:
    """Return the target with weights of these bits, and the draft."""
    config = EngineConfig(max_batch=1, max_context=MAX_CONTEXT)
    model, _ = load_pair_member(TARGET, dtype="auto", device="auto", config=config, weights=weights)
    return replace(load_reference(TARGET, DRAFT, max_context=MAX_CONTEXT), model=model)


def audited(url: str | None, seed: int, max_tokens: int, what: str) -> dict[str, object]:
    """Run one audit, with prompts of the seed, and return the figures of its row."""
    with server_of(url, seed, what) as (address, settings):
        config = AuditConfig(max_tokens=max_tokens)
        endpoint = HttpEndpoint(
            ClientConfig(url=address), wants_logprobs=what == "self", num_clients=config.num_clients
        )
        texts = [prompt.text[: 150 + 10 * (seed % 20)] for prompt in held_out_prompts()]
        texts = texts[seed % len(texts) :] + texts[: seed % len(texts)]
        reference: Reference = ReportedLogprobs()
        if what == "self":
            ids = [endpoint.tokenize(text) for text in texts]
            prompts = [prompt for prompt in ids if prompt is not None]
            assert endpoint.find_scoring(prompts[0])
        else:
            reference = loaded_reference = reference_of(settings.get("weights", "auto"))
            assert loaded_reference.tokenizer is not None
            endpoint.ids_by_text = loaded_reference.ids_by_text
            prompts = [tuple(loaded_reference.tokenizer.encode(text)) for text in texts]
        audit = Audit(config, endpoint, reference, prompts, StateFile(None, {"url": address}))
        row = row_of(audit)
        endpoint.close()
    return {
        "settings": settings,
        **row,
        "num_judged": audit.ledger.arms["served"].num_tokens["all"],
        "num_drafted": audit.ledger.arms["served"].num_drafted["all"],
        "num_without_ids": audit.progress.num_without_ids,
        "notes": judge(audit).notes,
    }


if __name__ == "__main__":
    main()
