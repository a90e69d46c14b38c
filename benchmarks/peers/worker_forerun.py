"""forerun behind the protocol; runs in the project's own environment."""

from __future__ import annotations

from collections.abc import Sequence

from protocol import PLAIN, Setup, serve, versions_of

from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.sampling.config import SamplingParams


class Forerun:
    """Plain and speculative decoding over one loaded target."""

    def __init__(self, setup: Setup) -> None:
        config = EngineConfig(
            controller="fixed",
            num_speculative_tokens=setup.k,
            max_batch=setup.max_batch,
            max_context=setup.max_context,
            num_threads=setup.threads,
            sharing="none",  # every arm reads its prompts
        )
        plain = Engine.load(setup.target, config=config)
        self.engines = {PLAIN: plain}
        for arm in setup.arms:
            if arm != PLAIN:
                self.engines[arm] = plain.with_draft(setup.draft, setup.k)
        runner = type(plain.target).__name__
        self.settings = f"{setup.threads} threads, K={setup.k}, {runner}"

    @property
    def versions(self) -> dict[str, str]:
        return versions_of("forerun", "torch", "transformers")

    def generate(
        self, arm: str, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        outputs = self.engines[arm].generate(prompts, params)
        return [list(output.token_ids) for output in outputs]


if __name__ == "__main__":
    serve(Forerun)
