"""The shipped pair on a device of known speed, loaded once, and engines over it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.lab.device import DRAFT_PACE, TARGET_PACE, Device, Pace, on_device
from tests.lab.engine import VerdictChange, lab_engine

from forerun.control.base import Controller
from forerun.drafters.base import Drafter
from forerun.drafters.draft_model import DraftModel
from forerun.engine.config import EngineConfig, Sharing
from forerun.engine.engine import Engine
from forerun.engine.loading import load_pair_member
from forerun.models.architecture import Runner
from forerun.models.base import LanguageModel
from forerun.models.catalog import held_out_prompts
from forerun.models.checkpoint import ModelFiles
from forerun.models.tokenizers import Tokenizer

__all__ = ["DRAFT", "MAX_K", "POOR_DRAFT", "TARGET", "Lab"]

TARGET = "zoo:code-11m"
DRAFT = "zoo:code-2m"
POOR_DRAFT = "zoo:books-1m"
MAX_K = 16
CONFIG = EngineConfig(
    num_speculative_tokens=MAX_K,
    max_batch=8,
    max_context=1000,
    num_threads=1,
    sharing="none",
    controller="fixed",
)


class Lab:
    """Loads every model once.

    Args:
        folder: for checkpoints that faults make.
        num_prompts: how many requests a run has, about; fewer make quicker and blurred runs.
        num_tokens: output tokens of a request, about.
        num_training_steps: of heads that are trained here.

    Attributes:
        device: that all of its models run on.
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_prompts: int = 12,
        num_tokens: int = 64,
        num_training_steps: int = 300,
    ) -> None:
        self.folder = folder
        self.num_prompts = num_prompts
        self.num_tokens = num_tokens
        self.num_training_steps = num_training_steps
        self.device = Device()
        self._loaded: dict[tuple[str, Runner], tuple[LanguageModel, Tokenizer]] = {}

    def model(self, name: str, runner: Runner = "auto") -> LanguageModel:
        """A model by name or folder, on no device but the machine."""
        return self._load(name, runner)[0]

    @property
    def tokenizer(self) -> Tokenizer:
        """Of target and drafts."""
        return self._load(TARGET)[1]

    def _load(self, name: str, runner: Runner = "auto") -> tuple[LanguageModel, Tokenizer]:
        known = self._loaded.get((name, runner))
        if known is None:
            config = replace(CONFIG, runner=runner)
            known = load_pair_member(name, dtype="auto", device="cpu", config=config)
            self._loaded[name, runner] = known
        return known

    def target(
        self, model: LanguageModel | str = TARGET, pace: Pace = TARGET_PACE
    ) -> LanguageModel:
        """A target on the device, by name or as it is."""
        model = self.model(model) if isinstance(model, str) else model
        return on_device(model, pace, self.device, "target")

    def draft_model(
        self, model: LanguageModel | str = DRAFT, pace: Pace = DRAFT_PACE
    ) -> LanguageModel:
        """A draft model on the device, by name or as it is."""
        model = self.model(model) if isinstance(model, str) else model
        return on_device(model, pace, self.device, "draft")

    def drafter(self, model: LanguageModel | str = DRAFT, pace: Pace = DRAFT_PACE) -> DraftModel:
        """A drafter as it should be."""
        return DraftModel(self.draft_model(model, pace), self.model(TARGET).vocab_size)

    def engine(
        self,
        drafter: Drafter | None,
        k: int,
        *,
        batch: int = 4,
        target: LanguageModel | None = None,
        controller: Controller | None = None,
        change_verdict: VerdictChange | None = None,
        sharing: Sharing = "none",
    ) -> Engine:
        """An engine of parts, every one of which may be at fault.

        Args:
            drafter: proposes; None decodes plainly.
            k: most tokens drafted per step.
            batch: sequences at once.
            target: verifies; None for the shipped one.
            controller: chooses K; None for always K.
            change_verdict: replaces verdicts; None leaves them.
            sharing: which requests may continue what others have in the cache.
        """
        return lab_engine(
            change_verdict=change_verdict,
            device=self.device,
            target=self.target() if target is None else target,
            tokenizer=self.tokenizer,
            drafter=drafter,
            controller=controller,
            config=replace(CONFIG, num_speculative_tokens=k, max_batch=batch, sharing=sharing),
            eos_token_ids=ModelFiles.open(TARGET).eos_token_ids(self.tokenizer),
        )

    def prompts(self) -> list[str]:
        """Texts that neither model was trained on."""
        return [prompt.text for prompt in held_out_prompts()]
