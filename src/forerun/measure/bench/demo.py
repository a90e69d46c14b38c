"""The demonstration: one chat decoded with and without a draft, then both ways compared.

The comparison is that of `forerun bench`, once for every format of the weights. Greedy texts are
compared token for token on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from forerun.engine.engine import Engine
from forerun.engine.results import Completion
from forerun.measure.bench.comparison import BenchComparison
from forerun.measure.bench.config import BenchConfig
from forerun.measure.bench.report import BenchReport
from forerun.measure.prompt_files import PromptEntry
from forerun.models.tokenizers import Tokenizer
from forerun.sampling.config import SamplingParams

EXAMPLE_TOKENS = 120
"""Most tokens of the text that is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleText:
    """One prompt decoded without and with a draft, greedily.

    Attributes:
        prompt: what was asked, or the text that is continued.
        arm: name of the arm that drafted.
    """

    prompt: str
    arm: str
    plain: Completion
    speculative: Completion
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextComparison:
    """How many greedy texts of arms with a draft were compared with those of plain decoding."""

    num_texts: int
    num_tokens: int
    num_different: int

    @classmethod
    def of(cls, reports: Sequence[BenchReport]) -> TextComparison:
        """Count the greedy texts of all blocks."""
        pairs = [
            (text, plain_text)
            for report in reports
            for cell in report.cells
            if cell.temperature == 0
            for plain, *others in cell.blocks
            for other in others
            for text, plain_text in zip(other.token_ids, plain.token_ids, strict=True)
        ]
        return cls(
            num_texts=len(pairs),
            num_tokens=sum(len(text) for text, _ in pairs),
            num_different=sum(text != plain for text, plain in pairs),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """Results of the demonstration: one comparison by format of the weights."""

    reports: Mapping[str, BenchReport]

    @property
    def texts(self) -> TextComparison:
        return TextComparison.of(tuple(self.reports.values()))

    def to_dict(self) -> dict[str, object]:
        return {
            "greedy_texts": asdict(self.texts),
            "weights": {name: report.to_dict() for name, report in self.reports.items()},
        }


class Demo:
    """Runs the demonstration; after an interrupt the results so far remain available.

    Args:
        benches: comparisons by the name of their format of the weights, in their order.
        prompts: None takes the shipped ones, of the kind that the target reads.
        end_s: on the clock; a slow machine exceeds it, because every cell needs two blocks.
        show_example: is called with the first text, before the comparisons.
    """

    def __init__(
        self,
        benches: Mapping[str, BenchConfig],
        prompts: Sequence[PromptEntry] | None = None,
        *,
        end_s: float,
        clock: Callable[[], float],
        notify: Callable[[str], None],
        show_example: Callable[[ExampleText], None],
    ) -> None:
        self.benches = benches
        self.prompts = prompts
        self.end_s = end_s
        self.clock = clock
        self.notify = notify
        self.show_example = show_example
        self.comparisons: dict[str, BenchComparison] = {}

    def run(self) -> None:
        """Show the example and run the comparisons, each in an equal share of the time left."""
        for num_done, (name, bench) in enumerate(self.benches.items()):
            comparison = BenchComparison(bench, self.prompts, clock=self.clock, notify=self.notify)
            self.comparisons[name] = comparison
            comparison.load()
            comparison.add_controllers({})
            if num_done == 0:
                self.show_example(self._decode_example(comparison))
            now_s = self.clock()
            share_s = (self.end_s - now_s) / (len(self.benches) - num_done)
            comparison.run(end_s=now_s + share_s)

    def report(self) -> DemoReport:
        """Return the report of the results so far."""
        reports = {name: comparison.report() for name, comparison in self.comparisons.items()}
        return DemoReport(
            reports={name: report for name, report in reports.items() if report.has_results}
        )

    def _decode_example(self, comparison: BenchComparison) -> ExampleText:
        """Decode the first prompt with plain decoding and with the last arm."""
        self.notify("decoding an example")
        arm = comparison.arms[-1]
        assert isinstance(arm.engine, Engine)
        params = SamplingParams(temperature=0, max_tokens=EXAMPLE_TOKENS)
        plain, speculative = (
            engine.generate([comparison.prompts[0]], params)[0].completions[0]
            for engine in (comparison.plain, arm.engine)
        )
        assert comparison.entries is not None  # of the prompts, which are loaded
        return ExampleText(
            prompt=comparison.entries[0].text or "",
            arm=arm.name,
            plain=plain,
            speculative=speculative,
            tokenizer=comparison.plain.tokenizer,
        )
