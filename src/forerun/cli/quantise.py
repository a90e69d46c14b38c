"""`forerun quantise`: write a model with weights of 8 or 4 bits, and measure the loss."""

from __future__ import annotations

import json
from codecs import getincrementaldecoder
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from forerun.bounded_read import open_bounded
from forerun.cli.command import Command
from forerun.cli.tables import SafeConsole, progress_bar
from forerun.errors import InvalidRequest
from forerun.models.architecture import WeightFormat

MAX_SAMPLE_BYTES = 1 << 20
TEXT_BYTES = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantiseOptions:
    """Options of `forerun quantise`."""

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """Folder, hub name or shipped model such as zoo:code-40m, in bf16 or fp32."""
    out: Path
    """Folder to write; it must be new or empty."""
    weights: WeightFormat = "int8"
    """int8, int4, or int4-int8, which has an output layer of 8 bits."""
    sample: Path | None = None
    """Text file to measure the loss on; default: the held-out prompts of the zoo, Python code."""
    json: bool = False
    """Print one JSON object."""


def run(options: QuantiseOptions) -> int:
    from forerun.measure.quantise import quantise_model
    from forerun.models.memory import readable

    texts = _read_texts(options.sample)
    with progress_bar("reading", 1.0) as report:
        made = quantise_model(options.model, options.out, options.weights, texts, report)
    if options.json:
        print(json.dumps(made.to_dict()))
        return 0
    SafeConsole().print(
        f"{made.folder}: {readable(made.num_bytes)} in {made.weights}, "
        f"{readable(made.num_bytes_before)} before\n"
        f"{made.quantised_bits_per_byte:.4f} bits per byte, {made.bits_per_byte:.4f} in bf16: "
        f"{made.loss:+.2%} on {made.num_sample_bytes} bytes of text",
        markup=False,
    )
    return 0


def _read_texts(sample: Path | None) -> list[str]:
    from forerun.models.catalog import held_out_prompts

    if sample is None:
        return [prompt.text for prompt in held_out_prompts()[:20]]
    with open_bounded(sample) as file:
        content = file.peek(MAX_SAMPLE_BYTES)
    try:
        text = getincrementaldecoder("utf-8")().decode(content)  # the last character may be cut
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"--sample {sample} is not UTF-8 text: {error}") from error
    return [text[begin : begin + TEXT_BYTES] for begin in range(0, len(text), TEXT_BYTES)][:40]


COMMAND = Command(
    options=QuantiseOptions,
    run=run,
    has_positional=True,
    description="Write a model with weights of 8 or 4 bits, and measure the loss against bf16.",
    examples=(
        "forerun quantise zoo:code-40m --out build/code-40m-int8",
        "forerun quantise path/to/model --out path/to/int4 --weights int4-int8 --sample text.txt",
    ),
)
