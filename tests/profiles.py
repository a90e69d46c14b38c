"""A profile of the pair that `tests.records` writes traces of, on a machine that is nowhere."""

from __future__ import annotations

import json

from tests.records import HEADER

from forerun.measure.profile import Profile, ProfileSetup, ReadLimit
from forerun.theory.cost import CostTable

SETUP = ProfileSetup(
    cpu="Imaginary 9000",
    num_cores=2,
    num_threads=2,
    device="cpu",
    dtype="bfloat16",
    target_runner="NativeModel",
    draft_runner="NativeModel",
    target_hash=HEADER.target_hash,
    draft_hash=str(HEADER.draft_hash),
)


def profile_of(greedy: CostTable, sampled: CostTable) -> Profile:
    """A profile with these costs and nothing measured."""
    return Profile(
        target="target",
        draft="draft",
        setup=SETUP,
        provenance={"date": "2026-01-01"},
        limit=ReadLimit(
            bytes_per_s=1e9,
            buffer_bytes=64,
            target_bytes=4_000_000_000,
            draft_bytes=200_000_000,
            kv_token_bytes=1000,
        ),
        measured=(),
        left_out=(),
        stable=True,
        greedy=greedy,
        sampled=sampled,
        reading=None,
    )


def exact_times(path):
    """Set the errors of a profile to 0: on a busy machine they are too large for predictions."""
    document = json.loads(path.read_text())
    for profile in document.get("profiles", [document]):
        for line in profile["greedy"]["lines"] + profile["sampled"]["lines"]:
            for name in ("verify_error_s", "overhead_error_s"):
                line[name] = [0.0] * len(line[name])
            line["plain_error_s"] = line["draft_error_s"] = 0.0
    path.write_text(json.dumps(document))


def rising_costs(path):
    """Let a pass take a tenth longer for every row: tiny passes are measured roughly."""
    document = json.loads(path.read_text())
    for line in document["greedy"]["lines"] + document["sampled"]["lines"]:
        line["verify_s"] = [line["plain_s"] * (0.9 + 0.1 * rows) for rows in line["rows"]]
        line["overhead_s"] = [0.0] * len(line["overhead_s"])
    path.write_text(json.dumps(document))
