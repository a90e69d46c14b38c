"""The demonstration on the shipped pair: plain decoding, a draft that costs, a draft that pays.

In order: the exactness check in fp32, the choice of K on calibration prompts, the comparison on
other prompts, the same at T=1. The time left decides how many prompts are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from forerun.bench.arms import Arms, load_arms, warm_up
from forerun.bench.compare import Arm, Block, Prompt, run_blocks, within_budget
from forerun.bench.config import DemoConfig
from forerun.bench.exactness import ExactnessReport, check_exactness
from forerun.bench.provenance import collect, content_hash
from forerun.bench.report import DemoReport
from forerun.bench.scout import scouted
from forerun.bench.summary import MIN_BLOCKS, best_arm, summarise
from forerun.engine.engine import Engine
from forerun.engine.results import Completion
from forerun.errors import InvalidRequest
from forerun.models.tokenizers import Tokenizer
from forerun.sampling.config import SamplingParams

__all__ = ["Demo", "Example"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One completion and what is needed to show where its tokens came from."""

    prompt: str
    completion: Completion
    tokenizer: Tokenizer


class Demo:
    """One run; what it has measured so far stays readable when it is interrupted.

    Args:
        config: what to compare.
        prompts: texts to continue; the first `config.num_calibration`, spread out, choose K.
        clock: seconds.
        started_s: when the time budget began, on that clock.
        tell: told what happens next.
    """

    def __init__(
        self,
        config: DemoConfig,
        prompts: Sequence[str],
        *,
        clock: Callable[[], float],
        started_s: float,
        tell: Callable[[str], None],
    ) -> None:
        self.config = config
        self.prompts = spread(prompts)
        self.clock = clock
        self.deadline_s = started_s + config.seconds
        self.tell = tell
        self.exactness: ExactnessReport | None = None
        self.calibration: list[Block] = []
        self.blocks: list[Block] = []
        self.sampled_blocks: list[Block] = []
        self.example: Example | None = None

    def run(self) -> None:
        """Do everything; at most a few seconds beyond the budget on a slow machine."""
        self.exactness = self._check_exactness()
        self.tell("loading models")
        arms = load_arms(self.config)
        chosen = self._choose_k(arms)
        first = self._compare((arms.plain, arms.general, chosen))
        self._compare_sampled((arms.plain, chosen))
        self._show_example(chosen, first)

    def report(self) -> DemoReport:
        """What there is so far; needs one measured prompt."""
        return DemoReport(
            rows=tuple(summarise(self.blocks)),
            sampled_rows=tuple(summarise(self.sampled_blocks)) if self.sampled_blocks else (),
            exactness=self.exactness,
            provenance=collect({name: content_hash(name) for name in self.config.models}),
            config=self.config,
            num_calibration=len(self.calibration),
        )

    def _check_exactness(self) -> ExactnessReport:
        """In fp32, where a batch of rows and a single row give the same logits but for rounding."""
        config = self.config
        self.tell("loading models in fp32")
        plain = Engine.load(config.target, dtype="float32", config=config.engine)
        speculative = plain.with_draft(config.domain_draft, config.domain_ks[-1], dtype="float32")
        self.tell("checking exactness")
        length = config.exact_tokens
        cases = {
            "greedy": SamplingParams(temperature=0, max_tokens=length),
            "at T=1 with a seed": SamplingParams(
                temperature=1, seed=1, max_tokens=length, verification="coupled"
            ),
        }
        return check_exactness(plain, speculative, self.prompts[: config.num_exact], cases)

    def _choose_k(self, arms: Arms) -> Arm:
        """The domain draft's best K, by prompts that are not scored afterwards."""
        _, prompts = self._warmed(arms.domain, arms.plain, self._set_aside)
        share = self._left_s / 5
        for block in self._timed(arms.domain, prompts, share, "choosing K", at_least=2):
            self.calibration.append(block)
        return best_arm(self.calibration)

    def _compare(self, arms: Sequence[Arm]) -> Prompt:
        """The comparison at T=0; returns its first prompt."""
        first, prompts = self._warmed(arms, arms[0], self._scored)
        share = self._left_s * 3 / 4
        for block in self._timed(arms, prompts, share, "comparing at T=0", at_least=MIN_BLOCKS):
            self.blocks.append(block)
        return first

    def _compare_sampled(self, arms: Sequence[Arm]) -> None:
        """The same at T=1, with the time that is left."""
        params = SamplingParams(temperature=1, max_tokens=self.config.max_tokens)
        prompts = [Prompt(text=text, params=params) for text in self._scored]
        for block in self._timed(arms, prompts, self._left_s, "comparing at T=1", at_least=0):
            self.sampled_blocks.append(block)

    def _warmed(
        self, arms: Sequence[Arm], plain: Arm, texts: Sequence[str]
    ) -> tuple[Prompt, Iterator[Prompt]]:
        """Prompts cut before they loop, and the first of them, on which every arm has warmed up."""
        prompts = scouted(plain.engine, texts, self._greedy)
        first = next(prompts, None)
        if first is None:
            raise InvalidRequest("the target's greedy text loops at once on every prompt")
        warm_up(arms, first)
        return first, chain([first], prompts)

    def _timed(
        self,
        arms: Sequence[Arm],
        prompts: Iterable[Prompt],
        seconds: float,
        stage: str,
        *,
        at_least: int,
    ) -> Iterator[Block]:
        """Blocks within a share of the time, each announced."""
        blocks = run_blocks(arms, prompts, self.clock)
        end_s = self.clock() + seconds
        self.tell(stage)
        timed = within_budget(blocks, end_s, self.clock, at_least=at_least)
        for count, block in enumerate(timed, start=1):
            self.tell(f"{stage}: {count} prompts")
            yield block

    def _show_example(self, arm: Arm, prompt: Prompt) -> None:
        """One completion with its sources."""
        self.tell("writing an example")
        assert isinstance(arm.engine, Engine)
        (output,) = arm.engine.generate([prompt.text], prompt.params)
        self.example = Example(
            prompt=prompt.text,
            completion=output.completions[0],
            tokenizer=arm.engine.tokenizer,
        )

    @property
    def _left_s(self) -> float:
        return max(0.0, self.deadline_s - self.clock())

    @property
    def _set_aside(self) -> Sequence[str]:
        """Prompts that choose K and are not scored."""
        return self.prompts[: self.config.num_calibration]

    @property
    def _scored(self) -> Sequence[str]:
        return self.prompts[self.config.num_calibration :]

    @property
    def _greedy(self) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=self.config.max_tokens)


def spread(prompts: Sequence[str], stride: int = 7) -> list[str]:
    """Neighbours apart: prompts of one module follow each other in the file."""
    return [prompt for start in range(stride) for prompt in prompts[start::stride]]
