"""Model descriptions for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from forerun.cli.description import DraftFit, ModelDescription
from forerun.models.memory import readable

__all__ = ["print_fit", "print_model"]


def print_model(model: ModelDescription) -> None:
    """A table of facts on stdout."""
    sizes, memory = model.architecture, model.memory
    rows = {
        "architecture": f"{sizes.name}, {sizes.num_layers} layers, width {sizes.hidden_size}, "
        f"{sizes.num_heads} heads of {sizes.head_dim} over {sizes.num_kv_heads} KV heads",
        "attention": reach(sizes.windows),
        "parameters": f"{model.num_parameters:,} in {model.dtype}",
        "context": f"{model.context:,} tokens of {sizes.max_positions:,}",
        "vocabulary": f"{model.num_tokens:,} tokens, logits {sizes.vocab_size:,} wide",
        "weights": readable(memory.weights_bytes),
        "KV": f"{readable(model.kv_bytes_per_token)} per token, "
        f"{readable(model.kv_bytes_per_slot)} per sequence, "
        f"{readable(memory.kv_bytes)} for {model.num_slots}",
        "logits": readable(memory.logits_bytes),
        "memory": f"{readable(memory.total_bytes)} in all",
        "hash": f"weights {model.weights_hash}, tokenizer {model.tokenizer_hash}",
        "folder": escape(model.folder),
    }
    table = Table(title=escape(model.name), title_justify="left", show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    Console(highlight=False).print(table)


def reach(windows: Sequence[int | None]) -> str:
    """How far the layers of a model see, from `Architecture.windows`."""
    ranges = [f"{window:,} tokens back" if window else "the whole context" for window in windows]
    if len(ranges) == 1:
        return f"every layer sees {ranges[0]}"
    return f"some layers see {', others '.join(ranges)}"


def print_fit(fit: DraftFit) -> None:
    """Whether the pair works, and what speaks against it."""
    console = Console(highlight=False)
    size = f"{fit.relative_size:.1%} of the target's parameters"
    if fit.fits:
        console.print(f"[bold green]the draft fits[/]: same tokenizer, {size}")
    else:
        console.print(f"[bold red]the draft does not fit[/] ({size})")
    for problem in fit.problems:
        console.print(f"  {problem}", markup=False)
    for token, target, draft in fit.vocabularies.first_differences:
        console.print(f"    id {token}: target {target!r}, draft {draft!r}", markup=False)
    for warning in fit.warnings:
        console.print(f"  [yellow]warning[/]: {escape(warning)}")
