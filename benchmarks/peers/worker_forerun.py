"""forerun behind the protocol; runs in the project's own environment."""

from __future__ import annotations

from collections.abc import Sequence

from protocol import Setup, serve, versions_of

from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.sampling.config import SamplingParams


class Forerun:
    """Plain and speculative decoding over one loaded target.

    The draft is whatever `Engine.with_draft` takes: a draft model, or the folder of a head.
    """

    def __init__(self, setup: Setup) -> None:
        config = EngineConfig(
            controller="fixed",
            num_speculative_tokens=max(setup.ks),
            max_batch=setup.max_batch,
            max_context=setup.max_context,
            num_threads=setup.threads,
            sharing="none",  # every arm reads its prompts
        )
        plain = Engine.load(setup.target, config=config)
        self.draft = setup.draft
        self.engines = {0: plain}
        self.settings = f"{setup.threads} threads, {type(plain.target).__name__}"

    @property
    def versions(self) -> dict[str, str]:
        return versions_of("forerun", "torch", "transformers")

    def generate(
        self, k: int, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> list[list[int]]:
        if k not in self.engines:  # the first call of every K is not counted
            self.engines[k] = self.engines[0].with_draft(self.draft, k)
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        outputs = self.engines[k].generate(prompts, params)
        return [list(output.token_ids) for output in outputs]


if __name__ == "__main__":
    serve(Forerun)
