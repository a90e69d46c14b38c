"""The draft's own texts, for the target to score: what it will be asked about when it drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from forerun.align.data.response_store import Maker, ResponseStore
from forerun.engine.engine import Engine
from forerun.engine.loading import check_vocabularies, load_pair_member
from forerun.models.content_hash import tokenizer_hash
from forerun.models.load import model_folder
from forerun.provenance import content_hash
from forerun.sampling.config import SamplingParams, draft_params

__all__ = ["draft_writer"]


def draft_writer(
    draft: str | Path, target: Engine, params: SamplingParams, folder: Path
) -> tuple[Engine, ResponseStore]:
    """An engine whose target is the draft, and where its responses are kept.

    They are kept by the draft's weights: a draft that has learned meanwhile writes anew.

    Args:
        draft: folder or name.
        target: the engine of the target: its tokenizer, ends of texts and settings are used.
        params: of the deployment.
        folder: of responses.

    Raises:
        InvalidModel: the draft is missing, damaged or of an unsupported kind.
        IncompatibleDraft: its tokenizer is not the target's.
    """
    config = replace(target.config, num_speculative_tokens=0)
    model, tokenizer = load_pair_member(
        draft, dtype="auto", device=str(target.target.device), config=config
    )
    check_vocabularies(target.tokenizer, tokenizer)
    # Ids beyond the target's own are padding, which the target cannot score.
    padding = tuple(range(target.target.vocab_size, model.vocab_size))
    own = draft_params(params)
    maker = Maker(
        source="draft",
        model=content_hash(str(draft)),
        tokenizer_hash=tokenizer_hash(model_folder(draft)),
        params=replace(own, bad_token_ids=own.bad_token_ids + padding),
    )
    engine = Engine(
        target=model,
        tokenizer=target.tokenizer,
        config=config,
        eos_token_ids=target.eos_token_ids,
    )
    return engine, ResponseStore(folder, maker)
