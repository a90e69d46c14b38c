"""Hugging Face transformers behind the protocol: `generate`, and assisted generation.

Assisted generation drafts a constant number of tokens: its defaults (20 tokens, a confidence stop,
a schedule) are slower. It takes one prompt at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from protocol import SPECULATIVE, Setup, serve, versions_of
from transformers import AutoModelForCausalLM, PreTrainedModel


class Transformers:
    """The eager model with its default (dynamic) cache."""

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        self.target = load(setup.target)
        self.draft = load(setup.draft) if SPECULATIVE in setup.arms else None
        self.settings = f"{setup.threads} threads, constant K, no confidence stop"

    @property
    def versions(self) -> dict[str, str]:
        return versions_of("transformers", "torch")

    def generate(
        self, k: int, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> list[list[int]]:
        if k and len(prompts) > 1:
            raise ValueError("assisted generation takes one prompt at a time")
        if k:
            assert self.draft is not None
            self.draft.generation_config.num_assistant_tokens = k
        ids = torch.tensor(prompts)
        output = self.target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            assistant_model=self.draft if k else None,
        )
        return output[:, ids.shape[1] :].tolist()


def load(folder: str) -> PreTrainedModel:
    """A model that ends no text early and whose drafts have a constant length."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    settings = model.generation_config
    settings.eos_token_id = None
    settings.num_assistant_tokens_schedule = "constant"
    settings.assistant_confidence_threshold = 0.0
    return model


if __name__ == "__main__":
    serve(Transformers)
