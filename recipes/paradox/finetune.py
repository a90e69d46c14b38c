"""Change the target: a short fine-tune on prose, as an update of a model in service would be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from forerun.align.config import TrainingConfig
from forerun.align.methods.base import MethodConfig
from forerun.align.methods.draft_model import DraftModelMethod
from forerun.align.objectives import OBJECTIVES
from forerun.align.samples import Packing, Sample, prompt_hash
from forerun.align.trainer import Trainer, make_accelerator
from forerun.align.workspace import Phases
from forerun.models.checkpoint import ModelFiles
from forerun.models.tokenizers import Tokenizer
from forerun.provenance import content_hash

PROSE = Path(__file__).parent / "prose"


def pieces(ids: Sequence[int], width: int) -> Iterator[Sample]:
    """A text in pieces of one width; every token but a piece's first is learned."""
    for start in range(0, len(ids) - 1, width):
        piece = tuple(ids[start : start + width])
        yield Sample(
            prompt_hash=prompt_hash(piece),
            token_ids=piece,
            spans=((1, len(piece)),),
            source="fixed",
        )


def books(tokenizer: Tokenizer, width: int) -> Iterator[Sample]:
    """The prose, in pieces."""
    for path in sorted(PROSE.glob("*.txt")):
        yield from pieces(tokenizer.encode(path.read_text("utf-8")), width)


def finetune(target: str, out: Path, config: TrainingConfig, console: Console) -> None:
    """Train all weights of the target on prose and save it; resumable like any training."""
    if out.exists():
        return
    method = DraftModelMethod(MethodConfig(target=target, draft=target))
    method.load()
    packing = Packing(
        list(books(ModelFiles.find(target).tokenizer, config.window)),
        window=config.window,
        seed=config.training_seed,
    )
    trainer = Trainer(
        config=config,
        module=method.loss(OBJECTIVES["ce"]),
        teacher=None,
        accelerator=make_accelerator(),
        folder=out.with_name(out.name + "-training"),
        identity={"target": content_hash(target), "texts": "prose"},
    )
    trainer.resume()
    with Phases(console).bar("training", "training step") as show:
        trainer.run(packing, config.num_steps, lambda step: show(step.step, config.num_steps))
    method.save(out, trainer.weights())
