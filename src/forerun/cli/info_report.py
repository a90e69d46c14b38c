"""Descriptions of models, drafts and heads, and whether a draft fits its target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
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
from forerun.models.memory import readable, weights_bytes
from forerun.models.mtp_layout import find_module
from forerun.models.tokenizers import compare_vocabularies
from forerun.terminal_text import shell_command

if TYPE_CHECKING:
    from forerun.engine.config import EngineConfig
    from forerun.theory.intervals import Interval


Facts = Mapping[str, Any]
"""What is known of a model, or of a draft and whether it fits, as `--json` prints it."""


def describe(files: ModelFiles, dtype: str, config: EngineConfig) -> Facts:
    """Return the architecture, sizes and memory of a model, its fastest runner and its drafts."""
    run = describe_run(
        files,
        dtype=dtype,
        device="cpu",
        max_batch=config.num_slots,
        max_context=config.max_context,
        max_staged_rows=config.max_nodes + 1,
    )
    sizes, geometry, tokenizer, memory = files.sizes, run.geometry, files.tokenizer, run.memory
    runner, objection = choose_runner(run)
    return {
        "name": files.name,
        "folder": str(files.folder),
        "architecture": sizes,
        "num_parameters": files.num_parameters,
        "dtype": str(geometry.dtype).removeprefix("torch."),
        "num_slots": config.num_slots,
        "context": geometry.capacity,
        "memory": memory,
        "kv_bytes_per_token": sizes.kv_token_elements * geometry.dtype.itemsize,
        "state_bytes": geometry.state_bytes,
        "weights_hash": files.content_hash,
        "tokenizer_hash": files.tokenizer_hash,
        "num_tokens": len(tokenizer.vocabulary),
        "stored_types": files.stored_types,
        "runner": runner,
        "slower_because": objection,
        "has_chat_template": tokenizer.has_chat_template,
        "sampling_defaults": sampling_defaults(files),
        "file_bytes": sum(path.stat().st_size for path in files.weight_files),
        "keeps_blocks": run.keeps_blocks and files.weights.is_packed,
        "drafts": dict(list_drafts(run, runner)),
        "card": read_card(files.folder),
        "kv_bytes_per_slot": memory.kv_bytes // config.num_slots,
        "total_bytes": memory.total_bytes,
    }


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
            kind = "an EAGLE-3 head" if "eagle3" in draft else "a draft model"
            yield draft, f"{kind} made for this target"
    if (module := find_module(files)) is not None:
        yield "mtp", f"the module {module.prefix}* in its files"
    for bits in ("int4", "int8") if runner == "native" else ():
        num_bytes = weights_bytes(
            files.num_parameters, run.architecture, run.geometry.dtype, bits, is_tied=run.is_tied
        )
        if (share := num_bytes / run.memory.weights_bytes) < 1.0:
            yield f"self:{bits}", f"{readable(num_bytes)}, reads {share:.0%} of the target's bytes"
    yield "suffix", "copies from the text, without a model"


def compare(target: Facts, draft: Facts, files: tuple[ModelFiles, ModelFiles]) -> Facts:
    """Return whether a draft model can draft for a target, and how; `files` are of both."""
    vocabularies = compare_vocabularies(files[0].tokenizer, files[1].tokenizer)
    problems: list[str] = []
    method, reason = "draft_model", "same tokenizer"
    if not vocabularies.identical:
        try:
            shared = map_vocabularies(files[0].tokenizer, files[1].tokenizer)
            method, reason = shared.way, shared.reason
        except IncompatibleDraft as error:
            problems = [str(error)] + [
                f"  id {token}: target {ours!r}, draft {theirs!r}"
                for token, ours, theirs in vocabularies.first_differences
            ]
    return {
        "fits": not problems,
        "problems": problems,
        "warnings": [*warn_of_pair(target, draft, files)],
        "method": method,
        "reason": reason,
        "vocabularies": vocabularies,
    }


def warn_of_pair(
    target: Facts, draft: Facts, files: tuple[ModelFiles, ModelFiles]
) -> Iterator[str]:
    """Yield warnings about properties of the pair that reduce its speed."""
    if draft["memory"].weights_bytes >= target["memory"].weights_bytes:
        yield "the draft is not smaller than the target: drafting will cost more than it saves"
    if draft["context"] < target["context"]:
        yield (
            f"the draft's context ends at {draft['context']} tokens: longer texts are decoded "
            "plainly"
        )
    if (changed := staleness(files[1].folder, files[0])) is not None:
        yield changed


def print_model(model: Facts) -> None:
    """Print a table of a model's properties on stdout."""
    sizes, memory, num_parameters = model["architecture"], model["memory"], model["num_parameters"]
    num_bits = 8 * memory.weights_bytes / num_parameters
    stated = ", ".join(f"{name} {value:g}" for name, value in model["sampling_defaults"].items())
    reason = model["slower_because"]
    rows = {
        "architecture": f"{sizes.name}, {sizes.num_layers} layers, width {sizes.hidden_size}, "
        f"{sizes.num_heads} heads of {sizes.head_dim} over {sizes.num_kv_heads} KV heads",
        "attention": _describe_reach(sizes.windows),
        "runner": model["runner"]
        + (f"; the native one does not support {reason}" if reason else "")
        + ", on a CPU",
        "parameters": f"{num_parameters:,} in {_describe_type(model)}",
        "context": f"{model['context']:,} tokens of {sizes.max_positions:,}"
        + (f": {sizes.position_limit}" if sizes.position_limit else ""),
        "vocabulary": f"{model['num_tokens']:,} tokens, logits {sizes.vocab_size:,} wide",
        "file": f"{readable(model['file_bytes'])} on disk, "
        f"{8 * model['file_bytes'] / num_parameters:.3g} bits per weight; stored as "
        + ", ".join(f"{kind} {share:.1%}" for kind, share in model["stored_types"].items()),
        "weights": f"{readable(memory.weights_bytes)} of memory in this type, {num_bits:.3g} bits "
        "per weight" + (f", the embedding also in {model['dtype']}" * model["keeps_blocks"]),
        "chat": "has a chat template" if model["has_chat_template"] else "no chat template",
        "sampling": f"the model states {stated or 'nothing'}, for requests that leave it out",
        "KV": f"{readable(model['kv_bytes_per_token'])} per token, "
        f"{readable(model['kv_bytes_per_slot'])} per sequence, "
        f"{readable(memory.kv_bytes)} for {model['num_slots']}",
        "logits": readable(memory.logits_bytes),
        "memory": f"{readable(memory.total_bytes)} in all",
        "hash": f"weights {model['weights_hash']}, tokenizer {model['tokenizer_hash']}",
        "folder": escape(model["folder"]),
        "drafts": escape("\n".join(_describe_drafts(model))),
    }
    if model["state_bytes"]:
        rows["recurrent states"] = (
            f"{readable(model['state_bytes'])} after a token, {readable(memory.states_bytes)} for "
            f"{model['num_slots']} sequences and the rows of a step"
        )
    if model["card"] is not None:
        rows["aligned"] = escape("\n".join(_list_alignment(model["card"])))
    _print_sheet(model["name"], rows)


def _describe_type(model: Facts) -> str:
    """Say in which type the parameters are in memory."""
    kinds = " and ".join(kind for kind in model["stored_types"] if kind not in FLOATS)
    if not kinds:
        return str(model["dtype"])
    if model["keeps_blocks"]:
        return f"{kinds}, as stored; bf16 after dequantisation with --dtype bfloat16"
    return f"{model['dtype']} after dequantisation of {kinds}"


def _describe_drafts(model: Facts) -> Iterator[str]:
    """Yield a line per draft that fits, and how to find out what one costs."""
    yield from (f"{name}: {needs}" for name, needs in model["drafts"].items())
    yield "self:N for its first N layers, recycling, and draft models (check one with --draft)"
    command = "forerun profile --target {model} --draft {draft}"
    shown = shell_command(command, model=model["name"], draft=next(iter(model["drafts"])))
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


def print_fit(kind: str, fit: Facts, remark: str = "") -> None:
    """Print whether a "draft" or a "head" fits, and what is wrong or unusual about it."""
    console = SafeConsole()
    verdict = "[bold green]the {} fits[/]" if fit["fits"] else "[bold red]the {} does not fit[/]"
    console.print(verdict.format(kind) + (remark and f": {escape(remark)}"))
    for problem in fit["problems"]:
        console.print(f"  {problem}", markup=False)
    for warning in fit["warnings"]:
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


def examine_head(files: ModelFiles, target_files: ModelFiles) -> Facts:
    """Load a head for a target, and return its sizes and whether it fits."""
    from forerun.drafters.dflash.load import read_dflash_for
    from forerun.drafters.dflash.network import is_dflash
    from forerun.drafters.eagle3.head import is_eagle3, names_layers, origin_of_layers
    from forerun.drafters.eagle3.load import read_for
    from forerun.drafters.medusa import load_medusa

    folder = files.folder
    target = load_model(target_files, max_batch=1, max_context=MAX_CONTEXT)
    settings = read_object(folder / "config.json")
    is_eagle = is_eagle3(settings)
    facts: dict[str, Any] = {
        "fits": True,
        "problems": [],
        "warnings": [],
        "folder": str(folder),
        "method": "eagle3" if is_eagle else "dflash" if is_dflash(settings) else "medusa",
        "sizes": {},
        "num_parameters": 0,
        "weights_hash": "not read",
    }
    try:
        head: Any
        if is_dflash(settings):
            head = read_dflash_for(folder, target)
        else:
            head = read_for(folder, target) if is_eagle else load_medusa(folder, target).heads
        facts["sizes"] = asdict(head.config)
        facts["num_parameters"] = sum(part.numel() for part in head.parameters())
        facts["weights_hash"] = weights_hash(folder.glob("*.safetensors"))
        if is_eagle and not names_layers(settings):
            facts["warnings"].append(origin_of_layers(settings, head.config.feature_layers))
    except (InvalidModel, IncompatibleDraft) as error:
        facts |= {"fits": False, "problems": [str(error)]}
    try:
        facts["warnings"] += filter(None, [staleness(folder, target_files)])
    except InvalidModel as error:
        facts["warnings"].append(f"the card is of no use: {error}")
    return facts


def print_head(fit: Facts) -> None:
    """Print a table of a head's properties, and whether it fits, on stdout."""
    num_parameters = fit["num_parameters"]
    rows = {
        "method": fit["method"],
        **{name.replace("_", " "): escape(str(size)) for name, size in fit["sizes"].items()},
        "parameters": f"{num_parameters:,} ({readable(2 * num_parameters)} in bf16)",
        "hash": fit["weights_hash"],
    }
    _print_sheet(fit["folder"], rows)
    print_fit("head", fit)
