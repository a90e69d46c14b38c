"""What every engine has to be told about an aligned draft."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import InvalidRequest
from forerun.sampling.config import SamplingParams, draft_params

__all__ = ["EngineSettings", "Serving"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A pair as it is to be deployed.

    Attributes:
        target: folder or hub name, as an engine takes it.
        draft: folder of the draft.
        num_speculative_tokens: K.
        sampling: parameters of the requests.
        draft_context: tokens the draft was made for.
        target_context: tokens the target was made for.

    Raises:
        InvalidRequest: K is no number of tokens to draft.
    """

    target: str
    draft: Path
    num_speculative_tokens: int
    sampling: SamplingParams
    draft_context: int
    target_context: int

    def __post_init__(self) -> None:
        """Refuse a pair that does not speculate."""
        if self.num_speculative_tokens < 1:
            raise InvalidRequest(
                f"num_speculative_tokens is {self.num_speculative_tokens}; a draft is exported to "
                "draft at least one token"
            )

    @property
    def drafts_greedily(self) -> bool:
        """Whether the draft proposes its most likely tokens."""
        return draft_params(self.sampling).greedy


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How one engine is told.

    Attributes:
        engine: its name.
        settings: its own options by their own names.
        command: what starts it, for a shell or for Python.
        language: of the command.
        notes: what the user has to know, a sentence each.
        source: where the options are documented.
    """

    engine: str
    settings: Mapping[str, Any]
    command: str
    language: str
    notes: tuple[str, ...]
    source: str
