"""Hugging Face transformers behind the protocol: `generate`, and assisted generation.

Assisted generation drafts a constant number of tokens, the best of a few measured at the first
call, which the harness does not count: its defaults (20 tokens, a confidence stop, a schedule) are
slower. It takes one prompt at a time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from protocol import PLAIN, SPECULATIVE, Setup, serve, versions_of
from transformers import AutoModelForCausalLM, PreTrainedModel

KS = (2, 3, 4, 6)
"""Constant K to choose from."""
CALIBRATION_TOKENS = 48
CALIBRATION_PROMPT = tuple(range(100, 164))


class Transformers:
    """The eager model with its default (dynamic) cache."""

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        self.target = load(setup.target)
        self.draft = load(setup.draft) if SPECULATIVE in setup.arms else None
        self.settings = f"{setup.threads} threads"
        self.best_k: int | None = None

    @property
    def versions(self) -> dict[str, str]:
        return versions_of("transformers", "torch")

    def generate(
        self, arm: str, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> list[list[int]]:
        if arm == SPECULATIVE and len(prompts) > 1:
            raise ValueError("assisted generation takes one prompt at a time")
        if arm == SPECULATIVE and self.best_k is None:
            self.best_k = self.choose_k()
            self.settings += f", constant K={self.best_k} (best of {KS}), no confidence stop"
        return self.continued(prompts, max_tokens, None if arm == PLAIN else self.draft)

    def continued(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        assistant: PreTrainedModel | None,
    ) -> list[list[int]]:
        """New tokens of every prompt; all prompts are of one length."""
        ids = torch.tensor(prompts)
        output = self.target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            assistant_model=assistant,
        )
        return output[:, ids.shape[1] :].tolist()

    def choose_k(self) -> int:
        """Set the constant K that generates fastest, and return it."""
        assert self.draft is not None
        settings = self.draft.generation_config
        seconds = {}
        for k in (KS[0], *KS):  # the first also warms up, and is measured again
            settings.num_assistant_tokens = k
            start_s = time.perf_counter()
            self.continued([CALIBRATION_PROMPT], CALIBRATION_TOKENS, self.draft)
            seconds[k] = time.perf_counter() - start_s
        settings.num_assistant_tokens = min(seconds, key=seconds.__getitem__)
        return settings.num_assistant_tokens


def load(folder: str) -> PreTrainedModel:
    """A model that ends no text early, and drafts without second thoughts where it drafts."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    settings = model.generation_config
    settings.eos_token_id = None
    settings.num_assistant_tokens_schedule = "constant"
    settings.assistant_confidence_threshold = 0.0
    return model


if __name__ == "__main__":
    serve(Transformers)
