"""From a prompt and its parameters to sequences; what cannot be honoured is refused here."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence as Seq

from forerun.engine.config import EngineConfig, RequestTerms
from forerun.engine.sequence import Sequence
from forerun.engine.stopping import TokenStops
from forerun.errors import InvalidRequest, QueueFull
from forerun.models.base import LanguageModel
from forerun.models.tokenizers import Detokenizer, Tokenizer
from forerun.sampling.config import SamplingParams
from forerun.sampling.history import History
from forerun.sampling.noise import request_key

__all__ = ["Intake", "Prompt"]

Prompt = str | Seq[int]


class Intake:
    """Checks requests and makes their sequences; only reads, so that any thread may ask.

    Args:
        target: who will read the prompts.
        tokenizer: of the target.
        eos_token_ids: tokens that end a text.
        config: of the engine.
    """

    def __init__(
        self,
        *,
        target: LanguageModel,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
        config: EngineConfig,
    ) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.config = config

    @property
    def max_context(self) -> int:
        """Prompt plus output tokens one sequence may have."""
        return min(self.config.max_context, self.target.max_context)

    @property
    def max_unfinished(self) -> int:
        """Sequences that may run and wait at once."""
        return self.config.max_batch + self.config.max_waiting

    def check(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """The ids of a prompt that can be continued under these parameters.

        Raises:
            InvalidRequest: it cannot; the message says why and what to do.
        """
        self._check_samples(params.n)
        for name, token in params.named_tokens():
            if token >= self.target.vocab_size:
                raise InvalidRequest(
                    f"{name} names token {token}, outside 0..{self.target.vocab_size - 1}"
                )
        return self._prompt_ids(prompt)

    def _check_samples(self, n: int) -> None:
        if n > self.max_unfinished:
            raise InvalidRequest(
                f"n is {n}, but at most {self.max_unfinished} sequences may run and wait "
                f"(max_batch {self.config.max_batch} and max_waiting {self.config.max_waiting}): "
                "ask for fewer samples, or raise max_waiting"
            )

    def check_open(self, n: int, num_unfinished: int) -> None:
        """Refuse `n` sequences where too many run and wait.

        Raises:
            QueueFull: not all of them have a place.
        """
        if num_unfinished + n > self.max_unfinished:
            raise QueueFull(
                f"{num_unfinished} sequences run and wait, at most {self.max_unfinished} may "
                f"(max_batch {self.config.max_batch} and max_waiting {self.config.max_waiting}), "
                f"so there is no room for {n} more: try again later, or raise max_waiting"
            )

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise InvalidRequest("the prompt is empty; give at least one token")
        if len(ids) >= self.max_context:
            raise InvalidRequest(
                f"the prompt has {len(ids)} tokens; the context holds {self.max_context}, "
                "one of them for output: shorten the prompt or raise max_context"
            )
        outside = next((t for t in ids if not 0 <= t < self.target.vocab_size), None)
        if outside is not None:
            raise InvalidRequest(
                f"prompt token {outside} is outside 0..{self.target.vocab_size - 1}"
            )
        return ids

    def sequences(
        self, request_id: str, ids: list[int], params: SamplingParams, terms: RequestTerms
    ) -> list[Sequence]:
        """One sequence per sample of a checked request, arrived now."""
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(8), "little")
        room = self.max_context - len(ids)
        max_new = room if params.max_tokens is None else min(room, params.max_tokens)
        arrived_at_s = time.monotonic()
        return [
            Sequence(
                request_id=request_id,
                index=index,
                params=params,
                ids=list(ids),
                num_prompt=len(ids),
                noise_key=request_key(seed, index),
                stops=TokenStops(params, self.eos_token_ids, max_new),
                detokenizer=Detokenizer(self.tokenizer),
                history=self._history(params, ids),
                arrived_at_s=arrived_at_s,
                scope=self.config.scope_of(terms.tenant),
                rank=(terms.priority, 0),
                ends_at_s=arrived_at_s + (terms.deadline_s or math.inf),
            )
            for index in range(params.n)
        ]

    def _history(self, params: SamplingParams, ids: list[int]) -> History | None:
        """Token counts and masks, for requests whose processors need them."""
        if not params.needs_history:
            return None
        return History.of(
            params,
            ids,
            vocab_size=self.target.vocab_size,
            eos_token_ids=self.eos_token_ids,
            device=self.target.device,
        )
