"""Model descriptions for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from forerun.cli.description import DraftFit, ModelDescription
from forerun.models.draft_card import CardFigures, DraftCard
from forerun.models.memory import readable
from forerun.theory.intervals import Interval

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
    if model.card is not None:
        rows["aligned"] = escape("\n".join(story(model.card)))
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


def story(card: DraftCard) -> Iterator[str]:
    """What an aligned draft was made for, and what that brought, line by line."""
    yield (
        f"to {card.target} ({card.target_hash}) by {card.objective} for T={card.temperature:g}, "
        f"{card.date or 'date unknown'}"
    )
    begun = {(f.temperature, f.num_speculative_tokens): f for f in card.before}
    for after in card.after:
        judged = after.temperature, after.num_speculative_tokens
        yield f"T={judged[0]:g}, K={judged[1]}: {', '.join(changes(begun.get(judged), after))}"


def changes(before: CardFigures | None, after: CardFigures) -> Iterator[str]:
    """Every figure that was measured, from what it was where that is known."""
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
