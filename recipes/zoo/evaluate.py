"""Judge the trained models and write their cards: held-out loss, loops, variety, the two gates."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from corpus import BOOK_SOURCES, HELD_OUT_MODULES, LIBRARY_SOURCES, PYTHON_SOURCES, Source
from train import TrainConfig, held_out_bits_per_byte
from transformers import AutoModelForCausalLM

from forerun.engine.engine import Engine
from forerun.models.catalog import held_out_prompts
from forerun.sampling.config import SamplingParams
from forerun.theory.acceptance import distinct_ngram_share, first_repeat

NUM_NEW_TOKENS = 192
SOURCES = {
    "books.npy": BOOK_SOURCES,
    "python.npy": PYTHON_SOURCES,
    "library.npy": LIBRARY_SOURCES,
}
MIN_GAP_BITS_PER_BYTE = 0.15
MAX_LOOPING_SHARE = 0.2


@dataclass(frozen=True, kw_only=True)
class TextFigures:
    """Texts of one model at one temperature, NUM_NEW_TOKENS tokens after every held-out prompt."""

    temperature: float
    num_texts: int
    looping_share: float  # texts that repeat one of their 32-grams
    distinct_4gram_share: float


@dataclass(frozen=True, kw_only=True)
class ModelFigures:
    """What a card reports."""

    name: str
    num_parameters: int
    num_layers: int
    file_bytes: int
    held_out_bits_per_byte: float
    texts: tuple[TextFigures, ...]


def text_figures(engine: Engine, temperature: float, seed: int = 0) -> TextFigures:
    """Complete every held-out prompt and count loops and distinct 4-grams."""
    params = SamplingParams(
        temperature=temperature, max_tokens=NUM_NEW_TOKENS, seed=seed, ignore_eos=True
    )
    outputs = engine.generate([prompt.text for prompt in held_out_prompts()], params)
    texts = [output.token_ids for output in outputs]
    return TextFigures(
        temperature=temperature,
        num_texts=len(texts),
        looping_share=sum(first_repeat(ids, 32) < len(ids) for ids in texts) / len(texts),
        distinct_4gram_share=sum(distinct_ngram_share(ids, 4) for ids in texts) / len(texts),
    )


def judge(name: str, folder: Path, data: Path) -> ModelFigures:
    """All figures of one model, in bf16 as shipped."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    engine = Engine.load(folder)
    return ModelFigures(
        name=name,
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_layers=model.config.num_hidden_layers,
        file_bytes=(folder / "model.safetensors").stat().st_size,
        held_out_bits_per_byte=held_out_bits_per_byte(model, data),
        texts=tuple(text_figures(engine, t) for t in (0.0, 0.7, 1.0)),
    )


def check_gates(target: ModelFigures, domain: ModelFigures) -> list[str]:
    """The gates that fail, in words; empty when the pair may ship."""
    gap = domain.held_out_bits_per_byte - target.held_out_bits_per_byte
    looping = next(t.looping_share for t in target.texts if t.temperature == 0.7)
    failed = []
    if gap < MIN_GAP_BITS_PER_BYTE:
        failed.append(f"target leads the domain draft by {gap:.3f} bits per byte only")
    if looping > MAX_LOOPING_SHARE:
        failed.append(f"{looping:.0%} of the target's T=0.7 completions loop")
    return failed


def card(figures: ModelFigures, config: TrainConfig, purpose: str) -> str:
    """The model card in Markdown."""
    sources = SOURCES[config.tokens]
    rows = "\n".join(
        f"| {t.temperature:g} | {t.looping_share:.0%} | {t.distinct_4gram_share:.2f} |"
        for t in figures.texts
    )
    tokens = config.num_steps * config.micro_batch * config.accumulate * config.window
    return f"""---
license: apache-2.0
library_name: transformers
---
# {figures.name}

{purpose}

{figures.num_parameters / 1e6:.2f}M parameters, Llama-shaped: width {config.hidden_size},
{figures.num_layers} layers, vocabulary 8,192 (byte-level BPE),
context {config.context}, bf16, {figures.file_bytes / 2**20:.1f} MiB.
Trained by `recipes/zoo` on {tokens / 1e6:.1f}M tokens in windows of {config.window},
seed {config.seed}.

Held-out standard-library modules: **{figures.held_out_bits_per_byte:.3f} bits per byte**.

{figures.texts[0].num_texts} completions of {NUM_NEW_TOKENS} tokens after held-out prompts:

| temperature | share that loops (repeats a 32-gram) | distinct 4-gram share |
|---|---|---|
{rows}

## Data

{source_table(sources)}

Kept out of training, tests of them included: {", ".join(sorted(HELD_OUT_MODULES))}.

The model writes plausible Python; it is a test article for speculative decoding, not an assistant.
"""


def source_table(sources: tuple[Source, ...]) -> str:
    """Names, licences and repeats of the training sources."""
    rows = "\n".join(f"| {s.name} | {s.licence} | {s.repeat:g} |" for s in sources)
    return f"| source | licence | repeats |\n|---|---|---|\n{rows}"


def write_card(name: str, folder: Path, config: TrainConfig, data: Path) -> ModelFigures:
    """Judge one model, write README.md and figures.json beside its weights."""
    figures = judge(name, folder, data)
    (folder / "README.md").write_text(card(figures, config, PURPOSES[name]), "utf-8")
    (folder / "figures.json").write_text(json.dumps(asdict(figures), indent=1) + "\n")
    return figures


def write_cards(folders: dict[str, Path], runs: dict[str, TrainConfig], data: Path) -> list[str]:
    """Judge all, write README.md and figures.json beside the weights; returns failed gates."""
    figures = {name: write_card(name, folder, runs[name], data) for name, folder in folders.items()}
    return check_gates(figures["code-11m"], figures["code-2m"])


PURPOSES = {
    "code-40m": "A target that outgrows a processor's cache and completes Python source: "
    "`zoo:code-11m` widened to twice its width (`widen.py`), all of it trained on, then tuned "
    "against repeating itself (`unloop.py`).",
    "code-11m": "A target that fits in a processor's cache and completes Python source. After "
    "training it was tuned for 120 steps against repeating itself (`unloop.py`: unlikelihood on "
    "its own loops, "
    "averaged with the weights before).",
    "code-2m": "A draft for the target: trained on the target's own domain, then deepened and "
    "distilled to the target's own answers (`distil.py`; `forerun.json` has the figures).",
    "books-1m": "A draft with the right tokenizer and the wrong training: English "
    "books only. It shows what an unaligned draft costs.",
}
