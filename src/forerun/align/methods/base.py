"""What a method of drafting must be able to do to be trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from forerun.align.config import AttachedConfig
from forerun.align.objectives import Objective
from forerun.align.samples import Sample
from forerun.atomic_write import atomic_folder, remove_unfinished
from forerun.models.checkpoint import ModelFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodConfig:
    """What a draft is trained for and from.

    Attributes:
        target: its tokenizer and vocabulary are the draft's.
        draft: the draft or head to begin with; or see `init`.
        init: config.json of a draft to make from nothing.
        temperature: the one the draft is deployed at; decides which acceptance is reported.
        num_speculative_tokens: K of the deployment.
    """

    target: str | ModelFiles
    draft: str | None = None
    init: Path | None = None
    seed: int = 0
    temperature: float = 1.0
    num_speculative_tokens: int = 5
    attached: AttachedConfig = field(default_factory=AttachedConfig)


class Method(ABC):
    """A method of drafting, and what is trained by it: loaded, started, and saved in this order.

    Attributes:
        layers: layers of the target whose inputs the loss reads, beside its last hidden state; None
            for a draft that reads text alone.
    """

    layers: tuple[int, ...] | None = None

    def __init__(self, config: MethodConfig) -> None:
        self.config = config
        self.target = ModelFiles.find(config.target)

    @abstractmethod
    def load(self) -> None:
        """Load what training begins with, and refuse what does not fit the target.

        This comes before the target answers prompts, which may take hours.
        """

    @abstractmethod
    def start(self, samples: Sequence[Sample]) -> None:
        """Make what is still to be made before training, given the training texts."""

    @abstractmethod
    def loss(self, objective: Objective) -> nn.Module:
        """Return the loss of a batch with its teacher rows, as `methods.draft_model.DraftLoss`."""

    def muon_matrices(self) -> Sequence[nn.Parameter]:
        """Return the matrices that learn by Muon; all other parameters learn by AdamW."""
        return ()

    @abstractmethod
    def write(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write the files that the engine loads; `weights` are the loss's, by name."""

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write the folder that the engine loads."""
        remove_unfinished(folder)  # only one process writes it, under the lock of the folder
        with atomic_folder(folder) as scratch:
            self.write(weights, scratch)
