"""Reads log messages about speculation: refusals, vocabularies, weights, graphs, switch-offs."""

from __future__ import annotations

import re

from forerun.diagnose.readers.tally import Tally

__all__ = ["REMARKS", "Remarks", "TensorRtLlmLog"]


def remark(pattern: str, *facts: str) -> tuple[re.Pattern[str], tuple[str, ...]]:
    """Return a case-insensitive pattern, and the observations that a matching line means."""
    return re.compile(pattern, re.IGNORECASE), facts


# Between two words at most so much may stand: a line is no essay, and matching stays linear.
GAP = r".{0,80}?"
SPECULATION = r"(?:speculat\w*+|spec[- ]?dec\w*|draft(?:ing| model)?|assist\w*|mtp|eagle)"

REMARKS: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = (
    remark(
        r"vocab(?:ulary)?\b" + GAP + r"(?:must match|not match|mismatch|differ|incompatib)",
        "vocabularies_differ",
    ),
    remark(r"(?:tokeni[sz]er|vocab)\w*" + GAP + r"not compatible", "vocabularies_differ"),
    remark(
        r"(?:guided|grammar|structured)" + GAP + r"not supported" + GAP + SPECULATION,
        "grammar_used",
    ),
    remark(
        SPECULATION + GAP + r"(?:not supported|unsupported|disabled|not available|will not|"
        r"falling back|cannot be used|is ignored|skipping)",
        "speculation_refused",
    ),
    remark(
        r"(?:disabl\w+|ignor\w+|falling back from|skip\w+|no support for|does not support) "
        + GAP
        + SPECULATION,
        "speculation_refused",
    ),
    remark(r"not support partial sequence removal", "speculation_refused", "target_recurrent"),
    remark(
        r"(?:some weights|weights? of|tensor\w*|parameter\w*|keys?)"
        + GAP
        + r"(?:not initiali[sz]ed|newly initiali[sz]ed|missing|unexpected|not found|not loaded)",
        "weights_incomplete",
    ),
    remark(r"(?:logits|probabilit\w+|draft\w*)" + GAP + r"\bnan\b", "draft_nan"),
    remark(
        r"(?:cuda|hip|npu)[ _-]?graphs?" + GAP + r"(?:disabled|not supported|turned off|skipp)",
        "graphs_off",
    ),
    remark(r"enforce[_-]eager=True|--enforce-eager|--disable-cuda-graph", "graphs_off"),
    remark(r"\bpreempt(?:ed|ion)", "memory_pressure"),
    # Engines name settings of such layers whatever the model is; models and their state, only then.
    remark(
        r"(?:\bhybrid|\bmamba|\bssm|\bgdn|recurrent)[ -]"
        r"(?:kv|models?|attention|layers?|states?|architecture|memory|pages?|blocks?|target)\b|"
        r"memory_(?:recurrent|hybrid)|\bmamba num: [1-9]",
        "target_recurrent",
    ),
)


MAX_LENGTH = 400
"""What is said in words is said at once."""


class Remarks:
    """Reader of messages that any engine may log; they yield observations, not counts."""

    kind = "engine messages"

    def __init__(self) -> None:
        self.tally = Tally()

    def read(self, line: str) -> bool:
        """Read one line; False if it is of another format."""
        found = False
        line = line[:MAX_LENGTH]
        for pattern, facts in REMARKS:
            if pattern.search(line):
                found = True
                for fact in facts:
                    self.tally.set_fact(fact, True)
        return found

    def close(self) -> None:
        """Do nothing: every line was complete."""


GATE = re.compile(r"\[SpeculationGate\] Speculative decoding disabled: rolling acceptance avg")


class TensorRtLlmLog:
    """Reader of TensorRT-LLM's log, whose acceptance threshold disables drafting for good."""

    kind = "TensorRT-LLM log"

    def __init__(self) -> None:
        self.tally = Tally()

    def read(self, line: str) -> bool:
        """Read one line; False if it is of another format."""
        if not GATE.search(line):
            return False
        for name in ("speculation_off", "adaptive_k", "adaptive_stuck", "acceptance_low"):
            self.tally.set_fact(name, True)
        return True

    def close(self) -> None:
        """Do nothing: every line was complete."""
