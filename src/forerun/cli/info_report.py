"""Descriptions of models, drafts and heads, and whether a draft fits its target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.markup import escape
from rich.table import Table

from forerun.cli.tables import SafeConsole
from forerun.drafters.vocabulary_map import map_vocabularies
from forerun.engine.loading import sampling_defaults
from forerun.errors import IncompatibleDraft, InvalidModel
from forerun.models.catalog import ZOO_DRAFTS, ZOO_HEADS
from forerun.models.checkpoint import FLOATS, ModelFiles, read_object, weights_hash
from forerun.models.decoder import read_decoder, unsupported
from forerun.models.draft_card import CardFigures, DraftCard, read_card, staleness
from forerun.models.load import ModelRun, describe_run, load_model
from forerun.models.memory import MemoryEstimate, readable, weights_bytes
from forerun.models.mtp_layout import find_module
from forerun.models.tokenizers import compare_vocabularies
from forerun.terminal_text import shell_command

if TYPE_CHECKING:
    from forerun.engine.config import EngineConfig
    from forerun.models.architecture import Architecture
    from forerun.models.base import LanguageModel
    from forerun.theory.intervals import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """Architecture, sizes and memory of a model.

    Attributes:
        dtype: of weights and KV, as memory was worked out.
        runner: the fastest runner for it on a CPU.
        slower_because: what the native runner does not support of it; None if it runs the model.
        sampling_defaults: what the model states for requests that leave it out.
        file_bytes: size of the files that hold the weights.
        keeps_blocks: matrices stay in memory in the few bits that they are stored in.
        stored_types: share of the parameters by the type that they are stored as.
        drafts: what can draft for it, beside other models, and what each needs, in words.
        state_bytes: of the recurrent states of all layers after one token.
        num_tokens: entries of the tokenizer; the logits may be wider.
        card: what it was aligned to; None for a model that is no aligned draft.
    """

    name: str
    folder: str
    architecture: Architecture
    num_parameters: int
    dtype: str
    num_slots: int
    context: int
    memory: MemoryEstimate
    kv_bytes_per_token: int
    state_bytes: int
    weights_hash: str
    tokenizer_hash: str
    num_tokens: int
    stored_types: Mapping[str, float]
    runner: str
    slower_because: str | None
    has_chat_template: bool
    sampling_defaults: Mapping[str, float]
    file_bytes: int
    keeps_blocks: bool
    drafts: Mapping[str, str]
    card: DraftCard | None

    @property
    def kv_bytes_per_slot(self) -> int:
        return self.memory.kv_bytes // self.num_slots

    def to_dict(self) -> dict[str, object]:
        sums = {
            "kv_bytes_per_slot": self.kv_bytes_per_slot,
            "total_bytes": self.memory.total_bytes,
        }
        return asdict(self) | sums


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFit:
    """Whether a draft can draft for a target.

    Attributes:
        remark: how the draft would be used, and its size.
        details: of a draft model, its method and vocabulary; of a head, how its files were read.
    """

    remark: str
    details: Mapping[str, Any]
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, object]:
        found = {"fits": self.fits, "problems": self.problems, "warnings": self.warnings}
        return {**found, **self.details}


def describe(files: ModelFiles, dtype: str, config: EngineConfig) -> ModelDescription:
    run = describe_run(
        files,
        dtype=dtype,
        device="cpu",
        max_batch=config.num_slots,
        max_context=config.max_context,
        max_staged_rows=config.max_nodes + 1,
    )
    sizes, geometry, tokenizer = files.sizes, run.geometry, files.tokenizer
    runner, objection = choose_runner(run)
    return ModelDescription(
        name=files.name,
        folder=str(files.folder),
        architecture=sizes,
        num_parameters=files.num_parameters,
        dtype=str(geometry.dtype).removeprefix("torch."),
        num_slots=config.num_slots,
        context=geometry.capacity,
        memory=run.memory,
        kv_bytes_per_token=sizes.kv_token_elements * geometry.dtype.itemsize,
        state_bytes=geometry.state_bytes,
        weights_hash=files.content_hash,
        tokenizer_hash=files.tokenizer_hash,
        num_tokens=len(tokenizer.vocabulary),
        stored_types=files.stored_types,
        runner=runner,
        slower_because=objection,
        has_chat_template=tokenizer.has_chat_template,
        sampling_defaults=sampling_defaults(files),
        file_bytes=sum(path.stat().st_size for path in files.weight_files),
        keeps_blocks=run.keeps_blocks and files.weights.is_packed,
        drafts=dict(list_drafts(run, runner)),
        card=read_card(files.folder),
    )


def choose_runner(run: ModelRun) -> tuple[str, str | None]:
    """Return the fastest runner of a model on a CPU, and why it is not the native one."""
    sizes, settings = run.files.sizes, run.files.settings
    if (objection := unsupported(sizes, settings)) is not None:
        return "eager", objection
    if run.geometry.dtype != torch.float16:
        return "native", None
    return ("eager" if read_decoder(sizes, settings).beyond_graphs else "graphs"), "float16"


def list_drafts(run: ModelRun, runner: str) -> Iterator[tuple[str, str]]:
    """Yield the drafts that fit a model, with what each needs: shipped ones and its own."""
    files = run.files
    for draft in (ZOO_DRAFTS.get(files.name), ZOO_HEADS.get(files.name)):
        if draft is not None:
            kind = "an EAGLE-3 head" if draft in ZOO_HEADS.values() else "a draft model"
            yield draft, f"{kind} made for this target"
    if (module := find_module(files)) is not None:
        yield "mtp", f"the module {module.prefix}* in its files"
    for bits in ("int4", "int8") if runner == "native" else ():
        num_bytes = weights_bytes(
            files.num_parameters, run.architecture, run.geometry.dtype, bits, is_tied=run.is_tied
        )
        share = num_bytes / run.memory.weights_bytes
        yield f"self:{bits}", f"{readable(num_bytes)}, reads {share:.0%} of the target's bytes"
    yield "suffix", "copies from the text, without a model"


def compare(
    target: ModelDescription, draft: ModelDescription, files: tuple[ModelFiles, ModelFiles]
) -> DraftFit:
    """Compare a draft model with a target; `files` are of both."""
    vocabularies = compare_vocabularies(files[0].tokenizer, files[1].tokenizer)
    problems: tuple[str, ...] = ()
    method, reason = "draft_model", "same tokenizer"
    if not vocabularies.identical:
        try:
            shared = map_vocabularies(files[0].tokenizer, files[1].tokenizer)
            method, reason = shared.way, shared.reason
        except IncompatibleDraft as error:
            shown = [
                f"  id {token}: target {ours!r}, draft {theirs!r}"
                for token, ours, theirs in vocabularies.first_differences
            ]
            problems = (str(error), *shown)
    size = draft.num_parameters / target.num_parameters
    return DraftFit(
        remark=f"{reason}, {size:.1%} of the target's parameters",
        details={"method": method, "reason": reason, "vocabularies": asdict(vocabularies)},
        problems=problems,
        warnings=tuple(warn_of_pair(target, draft, files)),
    )


def warn_of_pair(
    target: ModelDescription, draft: ModelDescription, files: tuple[ModelFiles, ModelFiles]
) -> Iterator[str]:
    """Yield warnings about properties of the pair that reduce its speed."""
    if draft.memory.weights_bytes >= target.memory.weights_bytes:
        yield "the draft is not smaller than the target: drafting will cost more than it saves"
    if draft.context < target.context:
        yield (
            f"the draft's context ends at {draft.context} tokens: longer texts are decoded plainly"
        )
    if (changed := staleness(files[1].folder, files[0])) is not None:
        yield changed


def print_model(model: ModelDescription) -> None:
    """Print a table of a model's properties on stdout."""
    sizes, memory = model.architecture, model.memory
    num_bits = 8 * memory.weights_bytes / model.num_parameters
    stated = ", ".join(f"{name} {value:g}" for name, value in model.sampling_defaults.items())
    reason = model.slower_because
    rows = {
        "architecture": f"{sizes.name}, {sizes.num_layers} layers, width {sizes.hidden_size}, "
        f"{sizes.num_heads} heads of {sizes.head_dim} over {sizes.num_kv_heads} KV heads",
        "attention": _describe_reach(sizes.windows),
        "runner": model.runner
        + (f"; the native one does not support {reason}" if reason else "")
        + ", on a CPU",
        "parameters": f"{model.num_parameters:,} in {_describe_type(model)}",
        "context": f"{model.context:,} tokens of {sizes.max_positions:,}"
        + (f": {sizes.position_limit}" if sizes.position_limit else ""),
        "vocabulary": f"{model.num_tokens:,} tokens, logits {sizes.vocab_size:,} wide",
        "file": f"{readable(model.file_bytes)} on disk, "
        f"{8 * model.file_bytes / model.num_parameters:.3g} bits per weight; stored as "
        + ", ".join(f"{kind} {share:.1%}" for kind, share in model.stored_types.items()),
        "weights": f"{readable(memory.weights_bytes)} of memory in this type, {num_bits:.3g} bits "
        "per weight" + (f", the embedding also in {model.dtype}" if model.keeps_blocks else ""),
        "chat": "has a chat template" if model.has_chat_template else "no chat template",
        "sampling": f"the model states {stated or 'nothing'}, for requests that leave it out",
        "KV": f"{readable(model.kv_bytes_per_token)} per token, "
        f"{readable(model.kv_bytes_per_slot)} per sequence, "
        f"{readable(memory.kv_bytes)} for {model.num_slots}",
        "logits": readable(memory.logits_bytes),
        "memory": f"{readable(memory.total_bytes)} in all",
        "hash": f"weights {model.weights_hash}, tokenizer {model.tokenizer_hash}",
        "folder": escape(model.folder),
        "drafts": escape("\n".join(_describe_drafts(model))),
    }
    if model.state_bytes:
        rows["recurrent states"] = (
            f"{readable(model.state_bytes)} after a token, {readable(memory.states_bytes)} for "
            f"{model.num_slots} sequences and the rows of a step"
        )
    if model.card is not None:
        rows["aligned"] = escape("\n".join(_list_alignment(model.card)))
    _print_sheet(model.name, rows)


def _describe_type(model: ModelDescription) -> str:
    """Say in which type the parameters are in memory."""
    kinds = " and ".join(kind for kind in model.stored_types if kind not in FLOATS)
    if not kinds:
        return model.dtype
    if model.keeps_blocks:
        return f"{kinds}, as stored; bf16 after dequantisation with --dtype bfloat16"
    return f"{model.dtype} after dequantisation of {kinds}"


def _describe_drafts(model: ModelDescription) -> Iterator[str]:
    """Yield a line per draft that fits, and how to find out what one costs."""
    yield from (f"{name}: {needs}" for name, needs in model.drafts.items())
    yield "self:N for its first N layers, recycling, and draft models (check one with --draft)"
    command = "forerun profile --target {model} --draft {draft}"
    shown = shell_command(command, model=model.name, draft=next(iter(model.drafts)))
    yield f"what one costs on this machine: {shown}"


def _describe_reach(windows: Sequence[int | None]) -> str:
    """Describe the number of earlier tokens that the layers attend to."""
    ranges = [f"{window:,} tokens back" if window else "the whole context" for window in windows]
    if len(ranges) == 1:
        return f"every layer sees {ranges[0]}"
    return f"some layers see {', others '.join(ranges)}"


def _list_alignment(card: DraftCard) -> Iterator[str]:
    """Yield lines on the alignment of a draft: target, objective, date and results."""
    yield (
        f"to {card.target} ({card.target_hash}) by {card.objective} for T={card.temperature:g}, "
        f"{card.date or 'date unknown'}"
    )
    begun = {(f.temperature, f.num_speculative_tokens): f for f in card.before}
    for after in card.after:
        judged = after.temperature, after.num_speculative_tokens
        figures = ", ".join(_list_figures(begun.get(judged), after))
        yield f"T={judged[0]:g}, K={judged[1]}: {figures}"


def _list_figures(before: CardFigures | None, after: CardFigures) -> Iterator[str]:
    """Yield every measured figure, with its value before the alignment where known."""
    names = (("acceptance_length", "tau"), ("acceptance_probability", "alpha"))
    for field, name in (*names, ("speedup", "predicted speedup")):
        found: Interval | None = getattr(after, field)
        earlier: Interval | None = getattr(before, field, None)
        if found is not None:
            start = "" if earlier is None else f"{earlier.estimate:.2f} -> "
            yield f"{name} {start}{found.estimate:.2f} ({found.low:.2f} to {found.high:.2f})"


def print_fit(kind: str, fit: DraftFit) -> None:
    """Print whether a "draft" or a "head" fits, and what is wrong or unusual about it."""
    console = SafeConsole()
    verdict = "[bold green]the {} fits[/]" if fit.fits else "[bold red]the {} does not fit[/]"
    console.print(verdict.format(kind) + (fit.remark and f": {escape(fit.remark)}"))
    for problem in fit.problems:
        console.print(f"  {problem}", markup=False)
    for warning in fit.warnings:
        console.print(f"  [yellow]warning[/]: {escape(warning)}")


def _print_sheet(title: str, rows: Mapping[str, str]) -> None:
    table = Table(title=escape(title), title_justify="left", show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    SafeConsole().print(table)


MAX_CONTEXT = 64
"""Tokens that a target has room for while a head is loaded for it."""


def examine_head(files: ModelFiles, target_files: ModelFiles) -> DraftFit:
    """Load a head for a target, and say whether it fits."""
    from forerun.drafters.eagle3.head import is_eagle3

    folder = files.folder
    target = load_model(target_files, max_batch=1, max_context=MAX_CONTEXT)
    is_eagle = is_eagle3(read_object(folder / "config.json"))
    details: dict[str, Any] = {
        "folder": str(folder),
        "method": "eagle3" if is_eagle else "medusa",
        "sizes": {},
        "num_parameters": 0,
        "weights_hash": "not read",
    }
    warnings: list[str] = []
    problems: tuple[str, ...] = ()
    try:
        head = _read_eagle3(folder, target) if is_eagle else _read_medusa(folder, target)
        details["sizes"] = asdict(head.config)
        details["num_parameters"] = sum(part.numel() for part in head.parameters())
        details["weights_hash"] = weights_hash(folder.glob("*.safetensors"))
        warnings += _warn_of_layers(folder, head.config.feature_layers) if is_eagle else ()
    except (InvalidModel, IncompatibleDraft) as error:
        problems = (str(error),)
    try:
        warnings += filter(None, [staleness(folder, target_files)])
    except InvalidModel as error:
        warnings.append(f"the card is of no use: {error}")
    return DraftFit(remark="", details=details, problems=problems, warnings=tuple(warnings))


def _read_eagle3(folder: Path, target: LanguageModel) -> Any:
    from forerun.drafters.eagle3.load import read_for

    return read_for(folder, target)


def _read_medusa(folder: Path, target: LanguageModel) -> Any:
    from forerun.drafters.medusa import load_medusa

    return load_medusa(folder, target).heads


def _warn_of_layers(folder: Path, layers: Sequence[int]) -> Iterator[str]:
    """Yield how the layers that an EAGLE-3 head reads were chosen, if its files do not say."""
    from forerun.drafters.eagle3.head import names_layers, origin_of_layers

    settings = read_object(folder / "config.json")
    if not names_layers(settings):
        yield origin_of_layers(settings, layers)


def print_head(fit: DraftFit) -> None:
    """Print a table of a head's properties, and whether it fits, on stdout."""
    details, num_parameters = fit.details, fit.details["num_parameters"]
    rows = {
        "method": details["method"],
        **{name.replace("_", " "): escape(str(size)) for name, size in details["sizes"].items()},
        "parameters": f"{num_parameters:,} ({readable(2 * num_parameters)} in bf16)",
        "hash": details["weights_hash"],
    }
    _print_sheet(details["folder"], rows)
    print_fit("head", fit)
