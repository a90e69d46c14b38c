"""`forerun probe`: run checks on loaded models that rule out causes of slow speculation."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.cli.command import Command
from forerun.cli.flags import LookAhead, ModelFlags, check_writable, use_threads
from forerun.cli.tables import SafeConsole, progress_bar
from forerun.doctor.probe.config import QUICK, EvidenceConfig
from forerun.engine.config import EngineConfig
from forerun.errors import IncompatibleDraft, InvalidRequest
from forerun.models.catalog import PREFIX
from forerun.sampling.config import SamplingParams, Verification
from forerun.terminal_text import shell_command

if TYPE_CHECKING:
    from forerun.doctor.evidence import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """Options of `forerun probe`."""

    models: ModelFlags = field(default_factory=ModelFlags)
    k: LookAhead = EngineConfig().num_speculative_tokens
    """K: most tokens drafted per step."""
    batch: int = 1
    """Sequences that decode together."""
    max_context: int = EngineConfig().max_context
    """Longest prompt and output."""
    prompts: Path | None = None
    """Prompts of the kind that is served: .jsonl with "prompt" or "messages", else one a line or
    between "---". Default for a model of the zoo: the shipped prompts."""
    raw: bool = False
    """Continue texts as they are, even if the model has a chat template."""
    temperature: float = 1.0
    """Of the sampled half of the probe, as served; the other half is greedy."""
    top_p: float = 1.0
    """As served."""
    top_k: int = 0
    """As served."""
    verification: Verification = "auto"
    """As served."""
    out: Path | None = None
    """Write the facts to this JSON file, which `forerun diagnose` reads."""
    json: bool = False
    """Print the facts file instead of a table."""
    quick: bool = False
    """Half the prompts, shorter texts: seconds where the models are small."""
    num_prompts: int | None = None
    """Number of prompts used, spread evenly over all."""
    num_tokens: int | None = None
    """Most output tokens of each."""
    once: bool = False
    """Load the target only once; it then drafts for itself in its own KV."""

    @property
    def config(self) -> EvidenceConfig:
        config = QUICK if self.quick else EvidenceConfig()
        changes = {"num_prompts": self.num_prompts, "num_tokens": self.num_tokens}
        return replace(config, **{name: n for name, n in changes.items() if n is not None})

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            verification=self.verification,
        )

    def check(self) -> str:
        """Refuse unusable options before anything is loaded, and return the draft's name."""
        draft = self.models.draft_name
        if draft is None:
            raise InvalidRequest(f"a probe is of a pair: name a --draft for {self.models.target}")
        if self.k < 1:
            raise InvalidRequest(
                f"--num-speculative-tokens is {self.k}; a probe needs drafts: give 1 or more"
            )
        if self.prompts is None and not self.models.target.startswith(PREFIX):
            raise InvalidRequest("give --prompts FILE, texts of the kind that is served")
        check_writable("--out", self.out)
        return draft


def run(options: ProbeOptions) -> int:
    """Run the checks on the pair, show the facts and write them."""
    config, params, draft = options.config, options.params, options.check()

    from forerun.atomic_write import atomic_write
    from forerun.doctor.readers.sources import facts_document

    evidence = probed(options, draft, config, params)
    document = facts_document(evidence, f"forerun probe of {options.models.target} and {draft}")
    text = json.dumps(document, indent=1) + "\n"
    if options.out is not None:
        with atomic_write(options.out) as scratch:
            scratch.write_text(text, encoding="utf-8")
    if options.json:
        print(text, end="")
    else:
        show(evidence, options.out)
    return 0


def probed(
    options: ProbeOptions, draft: str, config: EvidenceConfig, params: SamplingParams
) -> Evidence:
    """Load the models and run the checks; a pair that does not load is recorded as a fact."""
    from forerun.doctor.probe.run import PairNames, evidence_of_misfit, load_probed, probe_engine
    from forerun.measure.prompt_files import prompt_ids, read_prompts, shipped_prompts

    models = options.models
    engine = EngineConfig(
        num_speculative_tokens=options.k,
        controller="fixed",
        max_batch=options.batch,
        max_context=options.max_context,
        runner=models.runner,
        num_threads=use_threads(models.threads),
    )
    names = PairNames(target=models.target, draft=draft, dtype=models.dtype, device=models.device)
    entries = None if options.prompts is None else read_prompts(options.prompts)
    try:
        with SafeConsole(stderr=True).status("loading models"):
            loaded = load_probed(names, engine, twice=not options.once)
    except IncompatibleDraft as error:
        return evidence_of_misfit(error)
    tokenizer = loaded.engine.tokenizer
    entries = entries or shipped_prompts(tokenizer, raw=options.raw)
    prompts = [prompt_ids(entry, tokenizer, raw=options.raw) for entry in entries]
    with progress_bar("probing", 1.0) as notify:
        return probe_engine(loaded, prompts, params, config, notify)


def show(evidence: Evidence, out: Path | None) -> None:
    """Print every fact with its source, and the next command."""
    from rich.table import Column
    from rich.text import Text

    from forerun.cli.tables import table_of

    table = table_of(Column("fact", no_wrap=True), "value")
    table.add_column("from")
    for fact in evidence:
        table.add_row(fact.name, _value_text(fact.value), Text(fact.source))
    console = SafeConsole()
    console.print(table)
    command = shell_command(
        "forerun diagnose trace.jsonl {file}", file="facts.json" if out is None else out
    )
    more = "" if out is not None else " (write it with --out facts.json)"
    console.print(Text(f"\n{command} reports what follows{more}"), soft_wrap=True)


def _value_text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple):
        return f"{len(value)} values"
    return str(value)


COMMAND = Command(
    options=ProbeOptions,
    run=run,
    description="Measure on loaded models which causes can be ruled out: whether the target as\n"
    "its own draft is accepted, replayed text is accepted like live text, acceptance is\n"
    "what the distributions allow, greedy text equals plain decoding, and sampled text follows\n"
    "the target's distribution; what passes cost, and whether the files belong together. Writes\n"
    "facts for diagnose.",
    examples=(
        "forerun probe --model zoo:code-40m --draft zoo:code-2m-for-40m --out facts.json",
        "forerun diagnose trace.jsonl facts.json",
        "forerun probe --model path/to/model --draft path/to/draft --prompts served.jsonl",
        "forerun probe --quick --temperature 0.7 --top-p 0.9 --json | forerun diagnose -",
    ),
)
