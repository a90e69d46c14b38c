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
from forerun.errors import IncompatibleDraft, InvalidModel
from forerun.models.checkpoint import (
    read_checkpoint,
    read_described,
    read_object,
    tokenizer_hash,
    weights_hash,
)
from forerun.models.decoder import read_decoder, unsupported
from forerun.models.draft_card import CardFigures, DraftCard, read_card, staleness
from forerun.models.load import (
    choose_dtype,
    load_model,
    load_tokenizer,
    model_files,
    model_folder,
    read_config,
)
from forerun.models.memory import MemoryEstimate, geometry_of, readable
from forerun.models.mtp_layout import announced, find_module
from forerun.models.tokenizers import compare_vocabularies

if TYPE_CHECKING:
    from forerun.engine.config import EngineConfig
    from forerun.models.architecture import Architecture
    from forerun.models.base import LanguageModel
    from forerun.models.tokenizers import Tokenizer, VocabularyComparison
    from forerun.theory.intervals import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """Architecture, sizes and memory of a model.

    Attributes:
        dtype: of weights and KV, as memory was worked out.
        memory: bytes by purpose.
        kv_bytes_per_token: keys and values of one token over all layers.
        stored_types: share of the parameters by the type that they are stored as.
        state_bytes: of the recurrent states of all layers after one token.
        num_tokens: entries of the tokenizer; the logits may be wider.
        card: what it was aligned to; None for a model that is no aligned draft.
        mtp: what the tensors of its multi-token-prediction module begin with; None without one.
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
    weights_hash: str
    tokenizer_hash: str
    num_tokens: int
    stored_types: Mapping[str, float]
    state_bytes: int = 0
    card: DraftCard | None = None
    mtp: str | None = None

    @property
    def kv_bytes_per_slot(self) -> int:
        return self.memory.kv_bytes // self.num_slots

    def to_dict(self) -> dict[str, object]:
        derived = {
            "kv_bytes_per_slot": self.kv_bytes_per_slot,
            "total_bytes": self.memory.total_bytes,
        }
        return asdict(self) | derived


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Whether a draft can draft for a target."""

    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, object]:
        return {"fits": self.fits, **asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFit(Fit):
    """Comparison of a draft model with a target.

    Attributes:
        method: how the draft would be used: "draft_model", "tli" or "slem".
    """

    vocabularies: VocabularyComparison
    method: str
    reason: str
    relative_size: float


def describe(name: str, *, dtype: str, config: EngineConfig) -> tuple[ModelDescription, Tokenizer]:
    folder = model_folder(name)
    checkpoint = read_checkpoint(folder)
    tokenizer = load_tokenizer(folder)
    files = model_files(
        checkpoint,
        dtype=dtype,
        device="cpu",
        max_batch=config.num_slots,
        max_context=config.max_context,
        max_staged_rows=config.max_nodes + 1,
    )
    architecture, geometry = files.architecture, files.geometry
    module = find_module(checkpoint)
    description = ModelDescription(
        name=name,
        folder=str(folder),
        architecture=architecture,
        num_parameters=checkpoint.num_parameters,
        dtype=str(geometry.dtype).removeprefix("torch."),
        num_slots=config.num_slots,
        context=geometry.capacity,
        memory=files.memory,
        kv_bytes_per_token=architecture.kv_token_elements * geometry.dtype.itemsize,
        weights_hash=weights_hash(checkpoint.weight_files),
        tokenizer_hash=tokenizer_hash(folder),
        stored_types=checkpoint.stored_types,
        state_bytes=geometry.state_bytes,
        num_tokens=len(tokenizer.vocabulary),
        card=read_card(folder),
        mtp=None if module is None else module.prefix,
    )
    return description, tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigDescription:
    """Properties of a model that follow from its config.json alone.

    Attributes:
        runner: the fastest runner for it on a CPU.
        slower_because: what the native runner does not support of it; None if it runs the model.
        kv_bytes_per_token: bytes of keys and values in `dtype`.
        state_bytes: bytes of the recurrent states after one token, in `dtype`.
        mtp_modules: number of multi-token-prediction modules in the configuration.
        notice: message on tensors that are dequantised or not read; None without.
    """

    name: str
    architecture: Architecture
    dtype: str
    runner: str
    slower_because: str | None
    kv_bytes_per_token: int
    state_bytes: int
    mtp_modules: int
    notice: str | None


def describe_config(name: str, folder: Path, dtype: str) -> ConfigDescription:
    """Describe a model by its config.json; raises InvalidModel where it is not supported."""
    checkpoint = read_described(folder)
    settings, architecture = read_config(checkpoint)
    objection = unsupported(architecture, settings)
    if objection and read_object(folder / "config.json").get("quantization_config"):
        raise InvalidModel(
            f"{folder} has quantised weights, which the native and the graphs runner read, and "
            f"these do not support {objection}: use the bf16 or fp32 weights"
        )
    chosen = choose_dtype(dtype, checkpoint)
    runner = "native" if objection is None else "eager"
    if objection is None and chosen == torch.float16:
        objection = "float16"
        runner = "eager" if read_decoder(architecture, settings).beyond_graphs else "graphs"
    geometry = geometry_of(architecture, num_slots=1, capacity=1, max_staged_rows=0, dtype=chosen)
    count = announced(checkpoint)
    return ConfigDescription(
        name=name,
        architecture=architecture,
        dtype=str(chosen).removeprefix("torch."),
        runner=runner,
        slower_because=objection,
        kv_bytes_per_token=architecture.kv_token_elements * chosen.itemsize,
        state_bytes=geometry.state_bytes,
        mtp_modules=count if isinstance(count, int) else 0,
        notice=checkpoint.notice,
    )


def print_config(model: ConfigDescription) -> None:
    """Print a table of the properties that follow from config.json on stdout."""
    sizes = model.architecture
    rows = _architecture_rows(sizes) | {
        "context": f"{sizes.max_positions:,} tokens"
        + (f": {sizes.position_limit}" if sizes.position_limit else ""),
        "runner": model.runner
        + (
            f"; the native one does not support {model.slower_because}"
            if model.slower_because
            else ""
        ),
        "KV": f"{readable(model.kv_bytes_per_token)} per token in {model.dtype}",
        "drafts": "suffix, recycling, self:N, "
        + ("self:int4, " if model.runner == "native" else "")
        + "draft models"
        + (", mtp if its module is in the weights" if model.mtp_modules else ""),
    }
    if model.state_bytes:
        rows["recurrent states"] = f"{readable(model.state_bytes)} after a token"
    if model.notice is not None:
        rows["note"] = escape(model.notice)
    rows["read"] = "config.json alone: weights and tokenizer are not checked"
    _print_sheet(model.name, rows)


def compare(
    target: ModelDescription,
    draft: ModelDescription,
    tokenizer: Tokenizer,
    draft_tokenizer: Tokenizer,
) -> DraftFit:
    vocabularies = compare_vocabularies(tokenizer, draft_tokenizer)
    problems: tuple[str, ...] = ()
    method, reason = "draft_model", "same tokenizer"
    if not vocabularies.identical:
        try:
            shared = map_vocabularies(tokenizer, draft_tokenizer)
            method, reason = shared.way, shared.reason
        except IncompatibleDraft as error:
            problems = (str(error),)
    return DraftFit(
        vocabularies=vocabularies,
        method=method,
        reason=reason,
        problems=problems,
        warnings=tuple(warnings_of(target, draft)),
        relative_size=draft.num_parameters / target.num_parameters,
    )


def warnings_of(target: ModelDescription, draft: ModelDescription) -> Iterator[str]:
    """Return warnings about properties of the pair that reduce its speed."""
    if draft.memory.weights_bytes >= target.memory.weights_bytes:
        yield "the draft is not smaller than the target: drafting will cost more than it saves"
    if draft.context < target.context:
        yield (
            f"the draft's context ends at {draft.context} tokens: longer texts are decoded plainly"
        )
    if (changed := staleness(Path(draft.folder), Path(target.folder))) is not None:
        yield changed


def print_model(model: ModelDescription) -> None:
    """Print a table of a model's properties on stdout."""
    sizes, memory = model.architecture, model.memory
    rows = _architecture_rows(sizes) | {
        "parameters": f"{model.num_parameters:,} in {model.dtype}",
        "context": f"{model.context:,} tokens of {sizes.max_positions:,}"
        + (f": {sizes.position_limit}" if sizes.position_limit else ""),
        "vocabulary": f"{model.num_tokens:,} tokens, logits {sizes.vocab_size:,} wide",
        "weights": f"{readable(memory.weights_bytes)}, "
        f"{8 * memory.weights_bytes / model.num_parameters:.3g} bits per parameter; stored as "
        + ", ".join(f"{kind} {share:.1%}" for kind, share in model.stored_types.items()),
        "KV": f"{readable(model.kv_bytes_per_token)} per token, "
        f"{readable(model.kv_bytes_per_slot)} per sequence, "
        f"{readable(memory.kv_bytes)} for {model.num_slots}",
        "logits": readable(memory.logits_bytes),
        "recurrent states": f"{readable(model.state_bytes)} after a token, "
        f"{readable(memory.states_bytes)} for {model.num_slots} sequences and the rows of a step",
        "memory": f"{readable(memory.total_bytes)} in all",
        "hash": f"weights {model.weights_hash}, tokenizer {model.tokenizer_hash}",
        "folder": escape(model.folder),
    }
    if not model.state_bytes:
        del rows["recurrent states"]
    if model.mtp is not None:
        rows["draft"] = f"brings an MTP module ({model.mtp}*), which drafts by --draft mtp"
    if model.card is not None:
        rows["aligned"] = escape("\n".join(alignment_lines(model.card)))
    _print_sheet(model.name, rows)


def _architecture_rows(sizes: Architecture) -> dict[str, str]:
    return {
        "architecture": f"{sizes.name}, {sizes.num_layers} layers, width {sizes.hidden_size}, "
        f"{sizes.num_heads} heads of {sizes.head_dim} over {sizes.num_kv_heads} KV heads",
        "attention": reach(sizes.windows),
    }


def _print_sheet(title: str, rows: Mapping[str, str]) -> None:
    table = Table(title=escape(title), title_justify="left", show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    SafeConsole().print(table)


def reach(windows: Sequence[int | None]) -> str:
    """Describe the number of earlier tokens that the layers attend to."""
    ranges = [f"{window:,} tokens back" if window else "the whole context" for window in windows]
    if len(ranges) == 1:
        return f"every layer sees {ranges[0]}"
    return f"some layers see {', others '.join(ranges)}"


def alignment_lines(card: DraftCard) -> Iterator[str]:
    """Yield lines on the alignment of a draft: target, objective, date and results."""
    yield (
        f"to {card.target} ({card.target_hash}) by {card.objective} for T={card.temperature:g}, "
        f"{card.date or 'date unknown'}"
    )
    begun = {(f.temperature, f.num_speculative_tokens): f for f in card.before}
    for after in card.after:
        judged = after.temperature, after.num_speculative_tokens
        yield f"T={judged[0]:g}, K={judged[1]}: {', '.join(changes(begun.get(judged), after))}"


def changes(before: CardFigures | None, after: CardFigures) -> Iterator[str]:
    """List every measured figure, with its value before the alignment where known."""
    names = {
        "acceptance_length": "tau",
        "acceptance_probability": "alpha",
        "speedup": "predicted speedup",
    }
    for field, name in names.items():
        found: Interval | None = getattr(after, field)
        earlier: Interval | None = getattr(before, field, None)
        if found is not None:
            start = "" if earlier is None else f"{earlier.estimate:.2f} -> "
            spread = f"({found.low:.2f} to {found.high:.2f})"
            yield f"{name} {start}{found.estimate:.2f} {spread}"


def print_fit(fit: DraftFit) -> None:
    size = f"{fit.relative_size:.1%} of the target's parameters"
    _print_verdict("draft", fit, f": {fit.reason}, {size}" if fit.fits else f" ({size})")
    if not fit.fits:
        for token, target, draft in fit.vocabularies.first_differences:
            line = f"    id {token}: target {target!r}, draft {draft!r}"
            SafeConsole().print(line, markup=False)
    _print_warnings(fit)


def _print_verdict(kind: str, fit: Fit, remark: str = "") -> None:
    console = SafeConsole()
    verdict = "[bold green]the {} fits[/]" if fit.fits else "[bold red]the {} does not fit[/]"
    console.print(verdict.format(kind) + remark)
    for problem in fit.problems:
        console.print(f"  {problem}", markup=False)


def _print_warnings(fit: Fit) -> None:
    for warning in fit.warnings:
        SafeConsole().print(f"  [yellow]warning[/]: {escape(warning)}")


MAX_CONTEXT = 64
"""Tokens of the sequence on which features are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadDescription(Fit):
    """An attached drafter, the settings its files were read with, and whether it fits the target.

    Attributes:
        sizes: and flags, as they are used; empty where the head cannot be read.
        changes: readings that golden rows show and config.json states otherwise.
        is_checked: its golden rows were computed again.
    """

    folder: str
    method: str
    sizes: dict[str, Any]
    num_parameters: int
    weights_hash: str
    changes: tuple[str, ...] = ()
    is_checked: bool = False


def describe_head(folder: Path, target_folder: Path) -> HeadDescription:
    from forerun.drafters.eagle3.head import is_eagle3
    from forerun.engine.loading import check_head_card

    target = load_model(target_folder, max_batch=1, max_context=MAX_CONTEXT)
    is_eagle = is_eagle3(read_object(folder / "config.json"))
    described: dict[str, Any] = {"sizes": {}, "num_parameters": 0, "weights_hash": "not read"}
    try:
        described |= _of_eagle3(folder, target) if is_eagle else _of_medusa(folder, target)
        described["weights_hash"] = weights_hash(folder.glob("*.safetensors"))
        check_head_card(folder, target_folder)
    except (InvalidModel, IncompatibleDraft) as error:
        described["problems"] = (str(error),)
    return HeadDescription(
        folder=str(folder),
        method="eagle3" if is_eagle else "medusa",
        warnings=tuple(_head_warnings(folder, target_folder, is_eagle, described)),
        **described,
    )


def _of_eagle3(folder: Path, target: LanguageModel) -> dict[str, Any]:
    from forerun.drafters.eagle3.load import examine

    report = examine(folder, target)
    return {
        "sizes": asdict(report.head.config),
        "num_parameters": sum(p.numel() for p in report.head.parameters()),
        "changes": report.changes,
        "is_checked": report.is_checked,
    }


def _of_medusa(folder: Path, target: LanguageModel) -> dict[str, Any]:
    from forerun.drafters.medusa import load_medusa

    heads = load_medusa(folder, target).heads
    return {
        "sizes": asdict(heads.config),
        "num_parameters": sum(p.numel() for p in heads.parameters()),
    }


def _head_warnings(
    folder: Path, target_folder: Path, is_eagle: bool, described: dict[str, Any]
) -> Iterator[str]:
    if is_eagle and not described.get("is_checked") and "problems" not in described:
        from forerun.drafters.eagle3.head import origin_of_layers

        layers = origin_of_layers(
            read_object(folder / "config.json"), described["sizes"]["feature_layers"]
        )
        yield f"the head has no golden rows: its flags are taken as config.json says, and {layers}"
    for change in described.get("changes", ()):
        yield f"config.json is wrong: the golden rows show {change}, which is used"
    try:
        changed = staleness(folder, target_folder)
    except InvalidModel as error:
        changed = f"the card is of no use: {error}"
    if changed is not None:
        yield changed


def print_head(head: HeadDescription) -> None:
    """Print a table of a head's properties, and whether it fits, on stdout."""
    parameters = f"{head.num_parameters:,} ({readable(2 * head.num_parameters)} in bf16)"
    rows = {
        "method": head.method,
        **{name.replace("_", " "): escape(str(value)) for name, value in head.sizes.items()},
        "parameters": parameters,
        "golden rows": "computed again, equal" if head.is_checked else "none or not equal",
        "hash": head.weights_hash,
    }
    _print_sheet(head.folder, rows)
    _print_verdict("head", head)
    _print_warnings(head)
