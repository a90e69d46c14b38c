"""From settings to what is learned: read, split, answered, mixed, with what was rejected on top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun.align.config import DataConfig
from forerun.align.data.mix import mix, shares_of
from forerun.align.data.on_policy import draft_writer
from forerun.align.data.prompts import PromptRecord, read_prompts
from forerun.align.data.replay import replayed
from forerun.align.data.response_store import Maker, ResponseStore
from forerun.align.data.responses import Tell, write_responses
from forerun.align.data.sample import Sample, Source
from forerun.align.data.split import is_held_out, split
from forerun.engine.engine import Engine
from forerun.models.content_hash import tokenizer_hash
from forerun.models.load import model_folder
from forerun.provenance import content_hash
from forerun.sampling.config import SamplingParams
from forerun.theory.splitmix import finalise

__all__ = ["DataSet", "Gatherer"]

WRITER_SALT = 0x77726974
"""Makes another hash of a prompt's: who answers it says nothing of its side of the split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """What a draft learns from, and what it is judged on.

    Attributes:
        train: samples in their mix.
        held_out: prompts kept for judging.
    """

    train: tuple[Sample, ...]
    held_out: tuple[PromptRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gatherer:
    """Makes a data set; whatever it has made before is kept in its folder and not made again.

    Attributes:
        config: which prompts and which mix.
        target: its folder, name or shipped model.
        engine: of the target.
        params: of the deployment.
        folder: of responses.
        num_logprobs: most likely tokens a server is asked for, 0 for none.
        tell: progress of responses.
    """

    config: DataConfig
    target: str
    engine: Engine
    params: SamplingParams
    folder: Path
    num_logprobs: int = 0
    tell: Tell = lambda num_done, num_all: None

    def gather(self, draft: str | Path | None, *, seed: int = 0) -> DataSet:
        """Read, split, have answered, mix.

        Args:
            draft: writes the on-policy share, as it is now.
            seed: of the selection.

        Raises:
            InvalidRequest: the prompts, a response or the shares do not do; file and line are
                named where there are any.
            IncompatibleDraft: the draft has another tokenizer.
            ServerUnavailable: the server of responses is broken; run again to go on.
            OSError: the disk is full; run again to go on.
        """
        shares = shares_of(
            on_policy_share=self.config.on_policy_share, fixed_share=self.config.fixed_share
        )
        prompts = read_prompts(
            self.config.prompts, self.engine.tokenizer, self.config.max_prompt_tokens
        )
        train, held_out = split(prompts, self.config.held_out_share)
        samples = [
            *self._by_target(written_by("target", train, shares)),
            *self._by_draft(draft, written_by("draft", train, shares)),
            *(sample for prompt in train for sample in prompt.brought),
        ]
        return DataSet(
            train=(*mix(samples, shares, seed=seed), *self._rejected()), held_out=tuple(held_out)
        )

    def _by_target(self, prompts: Sequence[PromptRecord]) -> list[Sample]:
        """Responses of the target, in process or by its server."""
        if not prompts:
            return []
        store = ResponseStore(self.folder, self._maker())
        num_samples = self.config.samples_per_prompt
        if self.config.responses_from is None:
            write_responses(
                self.engine, prompts, store, samples_per_prompt=num_samples, tell=self.tell
            )
        else:
            self._ask_server(self.config.responses_from, prompts, store)
        return store.samples(prompts, num_samples)

    def _ask_server(self, url: str, prompts: Sequence[PromptRecord], store: ResponseStore) -> None:
        # httpx comes with the extra `align` only.
        from forerun.align.data.server import ResponseServer, ServerConfig, write_responses_from

        config = ServerConfig(url=url, model=self._model_name, num_logprobs=self.num_logprobs)
        write_responses_from(
            ResponseServer.connect(config, self.engine.tokenizer),
            prompts,
            store,
            samples_per_prompt=self.config.samples_per_prompt,
            tell=self.tell,
        )

    def _maker(self) -> Maker:
        model = content_hash(self.target)
        if self.config.responses_from is not None:
            # What a server runs is not known; it is to be the target, so another target asks anew.
            asked = (self.config.responses_from, self._model_name, str(self.num_logprobs))
            model = " ".join((model, *asked))
        return Maker(
            source="target",
            model=model,
            tokenizer_hash=tokenizer_hash(model_folder(self.target)),
            params=self.params,
        )

    @property
    def _model_name(self) -> str:
        return self.config.responses_model or self.target

    def _by_draft(self, draft: str | Path | None, prompts: Sequence[PromptRecord]) -> list[Sample]:
        """Responses of the draft."""
        if not prompts or draft is None:
            return []
        engine, store = draft_writer(draft, self.engine, self.params, self.folder)
        num_samples = self.config.samples_per_prompt
        write_responses(engine, prompts, store, samples_per_prompt=num_samples, tell=self.tell)
        return store.samples(prompts, num_samples)

    def _rejected(self) -> list[Sample]:
        """Rejected positions of all traces, those of held-out prompts left out."""
        found = [
            sample
            for path in self.config.replay
            for sample in replayed(
                path,
                target_hash=content_hash(self.target),
                tokenizer_hash=tokenizer_hash(model_folder(self.target)),
            )
        ]
        share = self.config.held_out_share
        return [sample for sample in found if not is_held_out(sample.prompt_hash, share)]


def written_by(
    source: Source, prompts: Sequence[PromptRecord], shares: Mapping[Source, float]
) -> list[PromptRecord]:
    """The prompts that target or draft has to answer: as many of them as its part of the tokens.

    Every prompt is answered by one of the two, chosen by its hash.
    """
    target_share = shares.get("target", 0.0)
    both = target_share + shares.get("draft", 0.0)
    if both == 0.0:
        return []
    most = target_share / both * 2.0**64
    by_target = source == "target"
    return [
        prompt
        for prompt in prompts
        if (finalise(int(prompt.prompt_hash, 16) ^ WRITER_SALT) < most) == by_target
    ]
