"""Settings of the demonstration; torch-free, so that the command line can read them cheaply."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.engine.config import EngineConfig

__all__ = ["DemoConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """What is compared, and for how long.

    Attributes:
        seconds: from the start of the command to the end of the last measurement, as far as the
            least number of prompts allows.
        max_tokens: longest completion measured.
        min_tokens: shortest `max_tokens` a slow machine is given.
        target: the model whose text is wanted.
        general_draft: a draft trained on other text than the target.
        general_k: its K.
        domain_draft: a draft trained on the target's domain.
        domain_ks: the K to choose from for it.
        num_calibration: prompts set aside for that choice.
        num_exact: prompts of the exactness check.
        exact_tokens: tokens per prompt there.
        max_batch: sequences decoded at once where nothing is timed.
        max_context: prompt and completion.
    """

    seconds: float = 60.0
    max_tokens: int = 64
    min_tokens: int = 24
    target: str = "zoo:target"
    general_draft: str = "zoo:draft-off-the-shelf"
    general_k: int = 10
    domain_draft: str = "zoo:draft-domain"
    domain_ks: tuple[int, ...] = (1, 2, 3, 4)
    num_calibration: int = 12
    num_exact: int = 3
    exact_tokens: int = 32
    max_batch: int = 8
    max_context: int = 1024

    @property
    def max_k(self) -> int:
        """The largest K of any arm."""
        return max(self.general_k, *self.domain_ks)

    @property
    def models(self) -> tuple[str, ...]:
        """Every model that is loaded."""
        return (self.target, self.general_draft, self.domain_draft)

    @property
    def engine(self) -> EngineConfig:
        """Settings of every engine, with room for the largest K."""
        return EngineConfig(
            num_speculative_tokens=self.max_k,
            max_batch=self.max_batch,
            max_context=self.max_context,
        )
