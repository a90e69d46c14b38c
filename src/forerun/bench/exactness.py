"""Checks that speculative output equals plain output token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from forerun.bench.compare import Generator
from forerun.sampling.config import SamplingParams

__all__ = ["ExactnessReport", "Mismatch", "check_exactness", "first_difference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """First position at which two outputs differ; a token is None after the end of an output."""

    case: str
    prompt: int
    position: int
    plain: int | None
    speculative: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactnessReport:
    """Number of outputs that an exactness check compared, and the mismatches.

    Attributes:
        num_tokens: tokens of plain decoding compared, per case.
        num_prompts: prompts compared in every case.
        num_accepted: draft tokens accepted on the way; without any, nothing was put to the test.
        mismatches: the first difference of every output that differs.
    """

    num_tokens: dict[str, int]
    num_prompts: int
    num_accepted: int
    mismatches: tuple[Mismatch, ...]

    @property
    def passed(self) -> bool:
        """Whether every output was identical."""
        return not self.mismatches

    @property
    def sentence(self) -> str:
        """Return the result as a sentence."""
        if self.mismatches:
            first = self.mismatches[0]
            return (
                f"{len(self.mismatches)} outputs differ from plain decoding; the first "
                f"({first.case}, prompt {first.prompt}) at token {first.position}: "
                f"plain {first.plain}, speculative {first.speculative}"
            )
        cases = " and ".join(f"{n} tokens {case}" for case, n in self.num_tokens.items())
        return (
            f"identical to plain decoding in fp32: {cases}, over {self.num_prompts} prompts, "
            f"{self.num_accepted} of them drafted and accepted"
        )

    def to_dict(self) -> dict[str, object]:
        """Return the fields of the JSON output."""
        return {"passed": self.passed, "sentence": self.sentence, **asdict(self)}


def check_exactness(
    plain: Generator,
    speculative: Generator,
    prompts: Sequence[str],
    cases: Mapping[str, SamplingParams],
) -> ExactnessReport:
    """Compare two engines whose outputs must be identical.

    Args:
        plain: decodes without a draft.
        speculative: the same target with one.
        prompts: what both continue.
        cases: parameters under which the output is a function of the prompt: greedy, or seeded with
            coupled verification. The name says what is tested.
    """
    num_tokens: dict[str, int] = {}
    mismatches: list[Mismatch] = []
    num_accepted = 0
    for case, params in cases.items():
        num_tokens[case] = 0
        # Plain decoding takes the prompts one by one: batches must not change a text either.
        references = [plain.generate([prompt], params)[0].token_ids for prompt in prompts]
        outputs = speculative.generate(prompts, params)
        for index, (reference, output) in enumerate(zip(references, outputs, strict=True)):
            num_tokens[case] += len(reference)
            num_accepted += output.completions[0].acceptance.num_accepted
            place = first_difference(reference, output.token_ids)
            if place is not None:
                tokens = {"plain": token_at(reference, place)}
                tokens["speculative"] = token_at(output.token_ids, place)
                mismatches.append(Mismatch(case=case, prompt=index, position=place, **tokens))
    return ExactnessReport(
        num_tokens=num_tokens,
        num_prompts=len(prompts),
        num_accepted=num_accepted,
        mismatches=tuple(mismatches),
    )


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the index of the first difference; None if both sequences are equal."""
    for index in range(max(len(one), len(other))):
        if token_at(one, index) != token_at(other, index):
            return index
    return None


def token_at(tokens: Sequence[int], index: int) -> int | None:
    """Return the token at an index, None past the end."""
    return tokens[index] if index < len(tokens) else None
