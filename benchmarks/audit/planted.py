"""Audits over HTTP of a small network with each fault of tests/lab/planted.py.

    python -m benchmarks.audit.planted --seeds 0-0 --tokens 20000
    python -m benchmarks.audit.planted --more            # those of tests/lab/planted_more.py

A row per audit goes to results/planted.jsonl or planted-more.jsonl; what is there is skipped.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.audit.run import RESULTS, add_rows, row_of, seeds_of
from tests import tiny
from tests.lab import planted_more
from tests.lab.planted import FAULTS
from tests.lab.planting import PlantedFault
from tests.server.conftest import serving

from forerun.client.connection import ClientConfig
from forerun.doctor.audit.config import AuditConfig
from forerun.doctor.audit.endpoint import HttpEndpoint
from forerun.doctor.audit.records import StateFile
from forerun.doctor.audit.reference import ReferenceModel
from forerun.doctor.audit.rounds import Chat
from forerun.doctor.audit.run import Audit

MAX_CONTEXT, NUM_SLOTS, TEMPLATE = 320, 10, "{{ messages[0]['content'] }}"


def model(jitter: float) -> Any:
    network = tiny.network(max_context=MAX_CONTEXT, scale=0.3, jitter=jitter)
    return tiny.adapted(network, NUM_SLOTS)


def audited(fault: PlantedFault | None, max_tokens: int, seed: int) -> dict[str, object]:
    """Audit the network with a fault, or without one."""
    engine = tiny.engine_over(
        model(0.0), tiny.drafting(model(0.04)), max_batch=8, max_context=MAX_CONTEXT, max_waiting=16
    )
    engine.tokenizer.use_chat_template(TEMPLATE)
    reference = ReferenceModel(
        model=model(0.0),
        tokenizer=tiny.tokenizer(),
        eos_token_ids=frozenset({tiny.EOS}),
        draft=model(0.04),
    )
    prompts: list[Any] = [
        tuple((7 * i * i + 3 * n + 5 * seed) % 299 + 1 for i in range(6 + 30 * (n % 4 == 0)))
        for n in range(100)
    ]
    config = AuditConfig(max_tokens=max_tokens)
    with serving(engine) as client, _planted(fault):
        endpoint = HttpEndpoint(
            ClientConfig(url=str(client.base_url)),
            wants_logprobs=False,
            num_clients=config.num_clients,
        )
        for n in range(20):
            message = f"def f{n}(a):"
            ids = endpoint.tokenize(message, is_message=True)
            assert ids is not None
            prompts.append(Chat(message=message, ids=ids))
        audit = Audit(config, endpoint, reference, prompts, StateFile(None, {"url": ""}))
        row = row_of(audit)
        endpoint.close()
    strongest = audit.ledger.deviations("served")[0]
    return {**row, "where": strongest.group, "direction": strongest.direction}


@contextlib.contextmanager
def _planted(fault: PlantedFault | None) -> Iterator[None]:
    with fault.plant() if fault is not None else contextlib.nullcontext():
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0-0")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--more", action="store_true")
    options = parser.parse_args()
    faults: list[PlantedFault | None] = [None, *FAULTS]
    if options.more:
        faults = [*planted_more.FAULTS]
    runs = (
        (
            f"{fault.family}: {fault.name}" if fault else "none",
            seed,
            partial(audited, fault, options.tokens, seed),
        )
        for seed in seeds_of(options.seeds)
        for fault in faults
    )
    name = "planted-more" if options.more else "planted"
    add_rows(RESULTS / f"{name}.jsonl", runs, options.seconds)


if __name__ == "__main__":
    main()
