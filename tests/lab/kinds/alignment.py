"""Faults of what the draft knows: target, text, prompt format, ids, positions."""

from __future__ import annotations

import torch
from jaxtyping import Int64
from tests.lab.dice import Dice
from tests.lab.laboratory import DRAFT, POOR_DRAFT, TARGET, Lab
from tests.lab.passes import ForeignIds, NearSighted
from tests.lab.setups import Fault, FaultSetup, Stage
from tests.lab.weights import altered_copy, moved, renumbered
from tests.lab.workload import compared, long_prompts, requests, setup_with_plain_stage
from torch import Tensor

__all__ = ["ALIGNMENT"]


def poor_draft(lab: Lab, dice: Dice) -> FaultSetup:
    """The draft of another domain."""
    engine = lab.engine(lab.drafter(POOR_DRAFT), dice.integer(1, 3))
    return setup_with_plain_stage(lab, engine, requests(lab, dice), POOR_DRAFT)


def stale_draft(lab: Lab, dice: Dice) -> FaultSetup:
    """The same traffic before and after the target was changed."""
    seed, distance = dice.integer(0, 1 << 30), dice.uniform(0.5, 0.8)
    folder = lab.folder / f"target-{seed}"
    changed = altered_copy(TARGET, folder, moved(distance, seed))
    k = dice.integer(2, 4)
    asked = requests(lab, dice)
    before = compared(lab, lab.engine(lab.drafter(), k), asked)
    engine = lab.engine(lab.drafter(), k, target=lab.target(changed))
    after = Stage(name="after", engine=engine, requests=asked, target=changed, draft=DRAFT)
    return FaultSetup(stages=(*before, after))


def as_diff(text: str) -> str:
    """Every line as an added one of a patch."""
    return "".join(f"+{line}\n" for line in text.splitlines())


def other_format(lab: Lab, dice: Dice) -> FaultSetup:
    """Some prompts come as patches, which the draft has hardly seen."""
    temperature = dice.choice((0.6, 0.7, 0.8))
    half = lab.num_prompts // 2 + 2
    texts = dice.sample(lab.prompts(), 2 * half)
    plain = requests(
        lab, dice, temperature=temperature, texts=texts[:half], count=half, tags=("template:plain",)
    )
    wrapped = [as_diff(text) for text in texts[half:]]
    patch = requests(
        lab, dice, temperature=temperature, texts=wrapped, count=half, tags=("template:patch",)
    )
    return setup_with_plain_stage(lab, lab.engine(lab.drafter(), dice.integer(2, 4)), plain + patch)


def permutation(dice: Dice, vocab_size: int, share: float) -> Int64[Tensor, " vocab"]:
    """Ids of which a share, drawn, have changed places."""
    order = torch.tensor(dice.sample(range(vocab_size), round(share * vocab_size)))
    ids = torch.arange(vocab_size)
    ids[order] = order.roll(1)
    return ids


def foreign_ids(lab: Lab, dice: Dice) -> FaultSetup:
    """The draft's ids are those of another tokenizer."""
    ids = permutation(dice, lab.model(DRAFT).vocab_size, dice.uniform(0.9, 1.0))
    folder = renumbered(DRAFT, lab.folder / f"ids-{dice.integer(0, 1 << 30)}", ids.tolist())
    model = ForeignIds(lab.model(DRAFT), ids, reads=dice.choice((True, False)))
    drafter = lab.drafter(model)
    asked = requests(lab, dice)
    stages = compared(lab, lab.engine(drafter, dice.integer(2, 4)), asked)
    return FaultSetup(stages=stages, draft_folder=folder)


def beyond_window(lab: Lab, dice: Dice) -> FaultSetup:
    """Contexts go past the positions the draft was made for."""
    window = dice.integer(220, 280)
    # The runner that takes positions as they are given; others count them by themselves.
    model = NearSighted(lab.model(DRAFT, "eager"), window)
    drafter = lab.drafter(model)
    texts = [
        *long_prompts(lab, dice, dice.integer(80, 140), lab.num_prompts // 3),
        *long_prompts(lab, dice, window + dice.integer(120, 200), lab.num_prompts // 3),
    ]
    tokens = 3 * lab.num_tokens // 4
    asked = requests(lab, dice, texts=texts, count=len(texts), max_tokens=tokens)
    return setup_with_plain_stage(lab, lab.engine(drafter, 2), asked)


ALIGNMENT = (
    Fault(
        name="poor draft",
        label="low_alignment",
        what="a draft trained on other text, at a K that suits it",
        varies="K, temperature",
        inject=poor_draft,
    ),
    Fault(
        name="stale draft",
        label="stale_draft",
        what="the target is replaced by another version of it while the trace goes on",
        varies="K, temperature, how far the target moved",
        inject=stale_draft,
    ),
    Fault(
        name="other prompt format",
        label="prompt_format_mismatch",
        what="half of the prompts come in a format the draft was not trained on, tagged as such",
        varies="K, temperature",
        inject=other_format,
    ),
    Fault(
        name="foreign token ids",
        label="tokenizer_mismatch",
        what="the draft's ids are permuted: read and answered, or answered only",
        varies="K, temperature, how many ids differ, whether it reads them as well",
        inject=foreign_ids,
    ),
    Fault(
        name="beyond the draft's window",
        label="draft_context_overflow",
        what="every position of the draft behind so many is the last one",
        varies="temperature, the window, prompt lengths",
        inject=beyond_window,
    ),
)
