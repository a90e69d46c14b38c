"""Descriptions of models, drafts and heads, and whether a draft fits its target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.markup import escape
from rich.table import Table

from forerun.cli.tables import SafeConsole
from forerun.drafters.vocabulary_map import map_vocabularies
from forerun.engine.sampling_defaults import sampling_defaults
from forerun.errors import IncompatibleDraft, InvalidModel
from forerun.measure.profile import Profile, load_profiles
from forerun.models.catalog import ZOO_DRAFTS, ZOO_HEADS
from forerun.models.checkpoint import FLOATS, ModelFiles, read_object, weights_hash
from forerun.models.decoder import read_decoder, unsupported
from forerun.models.draft_card import CardFigures, DraftCard, read_card, staleness
from forerun.models.load import STORED_DTYPES, choose_dtype, load_model, model_files
from forerun.models.memory import MemoryEstimate, geometry_of, readable, weights_bytes
from forerun.models.mtp_layout import announced, find_module
from forerun.models.tokenizers import compare_vocabularies
from forerun.provenance import cpu_model
from forerun.terminal_text import shell_command

if TYPE_CHECKING:
    from forerun.engine.config import EngineConfig
    from forerun.models.architecture import Architecture
    from forerun.models.base import LanguageModel
    from forerun.models.tokenizers import Tokenizer, VocabularyComparison
    from forerun.theory.intervals import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOption:
    """A draft that fits a target.

    Attributes:
        needs: memory beside the target, and what is known of it, in words.
        cost: measured costs in plain steps; None where they have not been measured.
    """

    name: str
    needs: str
    cost: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """Architecture, sizes and memory of a model.

    Attributes:
        dtype: of weights and KV, as memory was worked out.
        memory: bytes by purpose.
        kv_bytes_per_token: keys and values of one token over all layers.
        runner: the fastest runner for it on a CPU.
        slower_because: what the native runner does not support of it; None if it runs the model.
        has_chat_template: whether conversations can be rendered.
        sampling_defaults: what the model states for requests that leave it out.
        file_bytes: size of the files that hold the weights.
        keeps_blocks: matrices stay in memory in the few bits that they are stored in.
        stored_types: share of the parameters by the type that they are stored as.
        drafts: what can draft for it, beside other models.
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
    runner: str
    slower_because: str | None
    has_chat_template: bool
    sampling_defaults: Mapping[str, float]
    file_bytes: int
    keeps_blocks: bool
    drafts: tuple[DraftOption, ...] = ()
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


def describe(
    name: str, *, dtype: str, config: EngineConfig, profile: Path | None = None
) -> tuple[ModelDescription, Tokenizer]:
    files = ModelFiles.open(name)
    run = model_files(
        files,
        dtype=dtype,
        device="cpu",
        max_batch=config.num_slots,
        max_context=config.max_context,
        max_staged_rows=config.max_nodes + 1,
    )
    sizes, geometry, tokenizer = files.sizes, run.geometry, files.tokenizer
    module = find_module(files)
    runner, objection = choose_runner(sizes, files.settings, geometry.dtype)
    description = ModelDescription(
        name=name,
        folder=str(files.folder),
        architecture=sizes,
        num_parameters=files.num_parameters,
        dtype=str(geometry.dtype).removeprefix("torch."),
        num_slots=config.num_slots,
        context=geometry.capacity,
        memory=run.memory,
        kv_bytes_per_token=sizes.kv_token_elements * geometry.dtype.itemsize,
        weights_hash=files.content_hash,
        tokenizer_hash=files.tokenizer_hash,
        stored_types=files.stored_types,
        runner=runner,
        slower_because=objection,
        has_chat_template=tokenizer.has_chat_template,
        sampling_defaults=sampling_defaults(files),
        file_bytes=sum(path.stat().st_size for path in files.weight_files),
        keeps_blocks=run.keeps_blocks and files.weights.is_packed,
        state_bytes=geometry.state_bytes,
        num_tokens=len(tokenizer.vocabulary),
        card=read_card(files.folder),
        mtp=None if module is None else module.prefix,
    )
    costs = {} if profile is None else read_costs(profile, description)
    options = list_drafts(description, is_tied=run.is_tied)
    drafts = [replace(option, cost=costs.get(option.name)) for option in options]
    return replace(description, drafts=tuple(drafts)), tokenizer


def choose_runner(
    sizes: Architecture, settings: Mapping[str, Any], dtype: torch.dtype
) -> tuple[str, str | None]:
    """Return the fastest runner on a CPU, and why it is not the native one."""
    objection = unsupported(sizes, settings)
    if objection is not None:
        return "eager", objection
    if dtype != torch.float16:
        return "native", None
    return ("eager" if read_decoder(sizes, settings).beyond_graphs else "graphs"), "float16"


def list_drafts(model: ModelDescription, *, is_tied: bool) -> Iterator[DraftOption]:
    """Yield the drafts that fit a model: those without files, of the catalogue, and its own."""
    for draft in (ZOO_DRAFTS.get(model.name), ZOO_HEADS.get(model.name)):
        if draft is not None:
            kind = "an EAGLE-3 head" if draft in ZOO_HEADS.values() else "a draft model"
            yield DraftOption(name=draft, needs=f"{kind} made for this target")
    if model.mtp is not None:
        yield DraftOption(name="mtp", needs=f"the module {model.mtp}* in its files")
    if model.runner == "native":
        dtype = STORED_DTYPES[{"bfloat16": "BF16"}.get(model.dtype, "F32")]
        for bits in ("int4", "int8"):
            num_bytes = weights_bytes(
                model.num_parameters, model.architecture, dtype, bits, is_tied=is_tied
            )
            remark = ""
            if num_bytes >= 0.8 * model.memory.weights_bytes:
                remark = ", and reads about as much as the target itself: it will hardly pay"
            yield DraftOption(name=f"self:{bits}", needs=f"{readable(num_bytes)}{remark}")
    yield DraftOption(name="suffix", needs="copies from the text, without a model")


def read_costs(path: Path, model: ModelDescription) -> dict[str, str]:
    """Return measured costs by draft from a profile of this model on this machine, in words."""
    return {
        profile.draft: _cost_in_words(profile)
        for profile in load_profiles(path)
        if profile.setup.target_hash == model.weights_hash and profile.setup.cpu == cpu_model()
    }


def _cost_in_words(profile: Profile) -> str:
    table = profile.greedy
    share = table.draft_token_s() / table.plain_step_s()
    return f"a drafted token costs {share:.2f} plain steps, a cycle of 4 {table.cycle_cost(4):.2f}"


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
    files = ModelFiles.find(folder)
    settings, architecture, method = files.settings, files.sizes, files.description.quantisation
    stored = STORED_DTYPES[files.description.dtype]
    chosen = stored if dtype == "auto" else choose_dtype(dtype, files)
    runner, objection = choose_runner(architecture, settings, chosen)
    if method and unsupported(architecture, settings):
        raise InvalidModel(
            f"{folder} has quantised weights, which the native and the graphs runner read, and "
            f"these do not support {objection}: use the bf16 or fp32 weights"
        )
    geometry = geometry_of(architecture, num_slots=1, capacity=1, max_staged_rows=0, dtype=chosen)
    count = announced(files)
    return ConfigDescription(
        name=name,
        architecture=architecture,
        dtype=str(chosen).removeprefix("torch."),
        runner=runner,
        slower_because=objection,
        kv_bytes_per_token=architecture.kv_token_elements * chosen.itemsize,
        state_bytes=geometry.state_bytes,
        mtp_modules=count if isinstance(count, int) else 0,
        notice=f"its matrices are quantised ({method.get('quant_method')})"
        if method
        else files.notice
        if files.has_vision
        else None,
    )


def print_config(model: ConfigDescription) -> None:
    """Print a table of the properties that follow from config.json on stdout."""
    sizes = model.architecture
    rows = _architecture_rows(sizes) | {
        "context": f"{sizes.max_positions:,} tokens"
        + (f": {sizes.position_limit}" if sizes.position_limit else ""),
        "runner": _name_runner(model),
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
    num_bits = 8 * memory.weights_bytes / model.num_parameters
    stated = ", ".join(f"{name} {value:g}" for name, value in model.sampling_defaults.items())
    rows = _architecture_rows(sizes) | {
        "runner": f"{_name_runner(model)}, on a CPU",
        "parameters": f"{model.num_parameters:,} in {type_in_words(model)}",
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
        "recurrent states": f"{readable(model.state_bytes)} after a token, "
        f"{readable(memory.states_bytes)} for {model.num_slots} sequences and the rows of a step",
        "memory": f"{readable(memory.total_bytes)} in all",
        "hash": f"weights {model.weights_hash}, tokenizer {model.tokenizer_hash}",
        "folder": escape(model.folder),
    }
    if not model.state_bytes:
        del rows["recurrent states"]
    if model.drafts:
        rows["drafts"] = escape("\n".join(draft_lines(model)))
    if model.card is not None:
        rows["aligned"] = escape("\n".join(alignment_lines(model.card)))
    _print_sheet(model.name, rows)


def type_in_words(model: ModelDescription) -> str:
    """Say in which type the parameters are in memory."""
    kinds = [kind for kind in model.stored_types if kind not in FLOATS]
    if not kinds:
        return model.dtype
    named = " and ".join(kinds)
    if model.keeps_blocks:
        return f"{named}, as stored; bf16 after dequantisation with --dtype bfloat16"
    return f"{model.dtype} after dequantisation of {named}"


def draft_lines(model: ModelDescription) -> Iterator[str]:
    """Yield a line per draft that fits, and how to find out what the others cost."""
    for option in model.drafts:
        yield f"{option.name}: {option.needs}{(option.cost and f'; {option.cost}') or ''}"
    yield "self:N for its first N layers, recycling, and draft models (check one with --draft)"
    if any(option.cost is None for option in model.drafts):
        draft = model.drafts[0].name
        command = "forerun profile --target {model} --draft {draft} --out costs.json"
        shown = shell_command(command, model=model.name, draft=draft)
        yield f"to see what one costs here: {shown}, then info --profile costs.json"


def _name_runner(model: ModelDescription | ConfigDescription) -> str:
    reason = model.slower_because
    return model.runner + (f"; the native one does not support {reason}" if reason else "")


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
    """

    folder: str
    method: str
    sizes: dict[str, Any]
    num_parameters: int
    weights_hash: str


def describe_head(files: ModelFiles, target_files: ModelFiles) -> HeadDescription:
    from forerun.drafters.eagle3.head import is_eagle3

    folder = files.folder
    target = load_model(target_files, max_batch=1, max_context=MAX_CONTEXT)
    is_eagle = is_eagle3(read_object(folder / "config.json"))
    described: dict[str, Any] = {"sizes": {}, "num_parameters": 0, "weights_hash": "not read"}
    try:
        described |= _of_eagle3(folder, target) if is_eagle else _of_medusa(folder, target)
        described["weights_hash"] = weights_hash(folder.glob("*.safetensors"))
    except (InvalidModel, IncompatibleDraft) as error:
        described["problems"] = (str(error),)
    return HeadDescription(
        folder=str(folder),
        method="eagle3" if is_eagle else "medusa",
        warnings=tuple(_head_warnings(folder, target_files, is_eagle, described)),
        **described,
    )


def _of_eagle3(folder: Path, target: LanguageModel) -> dict[str, Any]:
    from forerun.drafters.eagle3.load import read_for

    head = read_for(folder, target)
    return {
        "sizes": asdict(head.config),
        "num_parameters": sum(p.numel() for p in head.parameters()),
    }


def _of_medusa(folder: Path, target: LanguageModel) -> dict[str, Any]:
    from forerun.drafters.medusa import load_medusa

    heads = load_medusa(folder, target).heads
    return {
        "sizes": asdict(heads.config),
        "num_parameters": sum(p.numel() for p in heads.parameters()),
    }


def _head_warnings(
    folder: Path, target_files: ModelFiles, is_eagle: bool, described: dict[str, Any]
) -> Iterator[str]:
    if is_eagle and "problems" not in described:
        from forerun.drafters.eagle3.head import names_layers, origin_of_layers

        settings = read_object(folder / "config.json")
        if not names_layers(settings):
            yield origin_of_layers(settings, described["sizes"]["feature_layers"])
    try:
        changed = staleness(folder, target_files)
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
        "hash": head.weights_hash,
    }
    _print_sheet(head.folder, rows)
    _print_verdict("head", head)
    _print_warnings(head)
