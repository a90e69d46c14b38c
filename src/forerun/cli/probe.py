"""Checks on loaded models for `forerun diagnose --probe`, which rule out causes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.cli.flags import Model, check_writable, use_threads
from forerun.cli.tables import SafeConsole, progress_bar
from forerun.doctor.probe.config import QUICK, EvidenceConfig
from forerun.drafters.config import AUTO, NONE
from forerun.engine.config import EngineConfig
from forerun.errors import IncompatibleDraft, InvalidRequest
from forerun.models.catalog import DEFAULT_TARGET, PREFIX, ZOO_DRAFTS
from forerun.sampling.config import SamplingParams

if TYPE_CHECKING:
    from forerun.doctor.evidence import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFlags:
    """A pair of models at hand, on which causes can be ruled out."""

    probe: bool = False
    """Load target and draft, and measure what speculation should do: whether the target as its own
    draft is accepted, replayed text is accepted like live text, text follows the target's
    distribution. --k, --batch and --temperature (default: 1) are those of the probe."""
    target: Model = DEFAULT_TARGET
    """Target: folder, hub name or zoo: name."""
    draft: str = AUTO
    """Draft model. Default: the shipped draft of a shipped target."""
    prompts: Path | None = None
    """Prompts of the kind that is served: .jsonl with "prompt" or "messages", else one a line or
    between "---". Default for a model of the zoo: the shipped prompts."""
    raw: bool = False
    """Continue texts as they are, even if the model has a chat template."""
    quick: bool = False
    """Half the prompts, shorter texts: seconds where the models are small."""
    out: Path | None = None
    """Write the facts of the probe to this JSON file, which `forerun diagnose` reads."""

    def check(self) -> str:
        """Refuse unusable options before anything is loaded, and return the draft's name."""
        draft = ZOO_DRAFTS.get(self.target, NONE) if self.draft == AUTO else self.draft
        if draft == NONE:
            raise InvalidRequest(f"a probe is of a pair: name a --draft for {self.target}")
        if self.prompts is None and not self.target.startswith(PREFIX):
            raise InvalidRequest("give --prompts FILE, texts of the kind that is served")
        check_writable("--out", self.out)
        return draft


def probe_pair(
    flags: ProbeFlags, k: float | None, batch: float | None, temperature: float | None
) -> Evidence:
    """Run the checks and write the facts; a pair that cannot be combined is a fact, too."""
    from forerun.atomic_write import atomic_write
    from forerun.doctor.readers.sources import facts_document

    draft = flags.check()
    params = SamplingParams(temperature=1.0 if temperature is None else temperature)
    k = EngineConfig().num_speculative_tokens if k is None else k
    if k < 1 or k != int(k):
        raise InvalidRequest(
            f"--num-speculative-tokens is {k:g}; a probe needs drafts: give 1, 2 or more"
        )
    batch = 1 if batch is None else batch
    if batch < 1 or batch != int(batch):
        raise InvalidRequest(f"--batch is {batch:g}; give a whole number of requests, from 1")
    engine = EngineConfig(
        num_speculative_tokens=int(k),
        controller="fixed",
        max_batch=int(batch),
        num_threads=use_threads(None),
    )
    evidence = _load_and_probe(flags, draft, engine, params)
    if flags.out is not None:
        source = f"forerun diagnose --probe of {flags.target} and {draft}"
        text = json.dumps(facts_document(evidence, source), indent=1) + "\n"
        with atomic_write(flags.out) as scratch:
            scratch.write_text(text, encoding="utf-8")
    return evidence


def _load_and_probe(
    flags: ProbeFlags, draft: str, engine: EngineConfig, params: SamplingParams
) -> Evidence:
    from forerun.doctor.probe.run import evidence_of_misfit, load_probed, probe_engine
    from forerun.measure.prompt_files import prompt_ids, read_prompts, shipped_prompts

    entries = None if flags.prompts is None else read_prompts(flags.prompts)
    try:
        with SafeConsole(stderr=True).status("loading models"):
            loaded = load_probed(flags.target, draft, engine)
    except IncompatibleDraft as error:
        return evidence_of_misfit(error)
    tokenizer = loaded.engine.tokenizer
    entries = entries or shipped_prompts(tokenizer, raw=flags.raw)
    prompts = [prompt_ids(entry, tokenizer, raw=flags.raw) for entry in entries]
    config = QUICK if flags.quick else EvidenceConfig()
    with progress_bar("probing", 1.0) as notify:
        return probe_engine(loaded, prompts, params, config, notify)
