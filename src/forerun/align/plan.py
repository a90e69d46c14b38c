"""The plan of an alignment: its settings by the target's size, and what it will take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from forerun.align.config import BLOCK_LAYERS, AlignConfig, Method, TrainingConfig
from forerun.align.samples import PromptRecord
from forerun.align.target import choose_faster_dtype
from forerun.bounded_read import read_json
from forerun.engine.engine import Engine
from forerun.models.architecture import Architecture
from forerun.models.checkpoint import ModelFiles
from forerun.models.load import choose_device, choose_dtype
from forerun.models.memory import estimate, geometry_of, readable
from forerun.sampling.config import SamplingParams

TEXTS_PER_PROMPT = 1.1
"""Texts that a target writes for one prompt that is kept, and their tokens; both as measured."""
TURN_TOKENS = 60
RESPONSE_SHARE = 0.9
"""Mean length of responses over the most that is allowed: many are cut."""
FULLNESS = 0.95
"""Share of packed rows that is text."""
MIN_TRAINED_TOKENS, MIN_PASSES, MAX_PASSES = 1_500_000, 1.5, 12
"""Texts are read as often as this many tokens take, within limits."""
DRAFT_VOCABULARY = 8192
"""Assumed where the responses will decide how many tokens a head can draft."""
EFFICIENCY = 0.75
"""Share of a training step that is matrix products at the measured rate."""
TRAINED_BYTES = 16
"""Of a trained parameter: in fp32, its gradient and two moments."""
CHOICE_BYTES = 4
"""Of a greedy target's token in the teacher's cache."""
PROBE_TOKENS, PROBE_STEPS, PROBE_SIZE = 128, 24, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSizes:
    """Sizes of a target, read without its weights."""

    num_parameters: int
    architecture: Architecture
    intermediate_size: int
    dtype: torch.dtype
    device: torch.device


def read_sizes(config: AlignConfig, files: ModelFiles) -> TargetSizes:
    """Read the sizes of the target from its configuration and the headers of its files."""
    return TargetSizes(
        num_parameters=files.num_parameters,
        architecture=files.sizes,
        intermediate_size=files.settings.get("intermediate_size") or 4 * files.sizes.hidden_size,
        dtype=choose_dtype(config.dtype, files),
        device=choose_device(config.device),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedDefaults:
    """Settings that suit a target's size and device; `num_prompts` if the target writes them."""

    num_prompts: int
    max_tokens: int
    window: int
    tokens_per_step: int
    learning_rate: float


def defaults_for(sizes: TargetSizes, method: Method) -> SizedDefaults:
    """Return the settings for flags that are left out."""
    billions = sizes.num_parameters / 1e9
    # SmolLM2-135M diverged at 1e-3, and learned more from 512 tokens a step than from 2,048.
    limits = ((0.05, 1e-3), (0.5, 5e-4), (3.0, 3e-4))
    rate = next((rate for limit, rate in limits if billions < limit), 1e-4)
    if method == "draft_model":
        rate = TrainingConfig().learning_rate  # it suits the draft, which is small
    on_cpu, is_large = sizes.device.type == "cpu", billions >= 1
    return SizedDefaults(
        num_prompts=5_000 if on_cpu else 20_000,
        max_tokens=128 if on_cpu else 512 if is_large else 256,
        window=512 if on_cpu else 2048 if is_large else 1024,
        tokens_per_step=512 if on_cpu else 16_384 if is_large else 8192,
        learning_rate=rate,
    )


def choose_num_steps(num_tokens: float, tokens_per_step: int) -> int:
    """Return the steps in which texts of this many tokens are read often enough."""
    least, most = MIN_PASSES * num_tokens, MAX_PASSES * num_tokens
    return max(1, math.ceil(min(max(MIN_TRAINED_TOKENS, least), most) / tokens_per_step))


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSizes:
    """Sizes of the prompts of an alignment.

    Attributes:
        num_texts: that the target writes to find the prompts; 0 where the user gave them.
        judged_on: what the held-out prompts are, in words.
        cut_prompts_share: share of prompts that are as long as they may be, so that most were cut.
        cut_texts_share: share of prompts that do not fit a window with the longest response.
    """

    num_training: int
    num_held_out: int
    judged_on: str
    prompt_tokens: float
    num_texts: int = 0
    cut_prompts_share: float = 0.0
    cut_texts_share: float = 0.0


def measure_prompts(
    training: Sequence[PromptRecord], max_prompt_tokens: int, most: int
) -> tuple[float, float, float]:
    """Return mean tokens of prompts, and the shares cut as prompts and longer than `most`."""
    lengths = [len(prompt.prompt_ids) for prompt in training]
    num_cut = sum(length >= max_prompt_tokens for length in lengths)
    num_long = sum(length > most for length in lengths)
    return sum(lengths) / len(lengths), num_cut / len(lengths), num_long / len(lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Speed of this machine: tokens per second of the target, products per second of training."""

    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    flop_per_s: float


def measure_rates(engine: Engine, clock: Callable[[], float] = time.perf_counter) -> Rates:
    """Time a short prompt, a few steps of a full batch, and products of matrices."""
    vocab, batch = engine.target.vocab_size, engine.config.max_batch
    num_read = min(PROBE_TOKENS, engine.max_context - 1)
    num_steps = min(PROBE_STEPS, engine.max_context - 2)

    def seconds(prompts: list[list[int]], max_tokens: int) -> float:
        params = SamplingParams(temperature=1.0, max_tokens=max_tokens, ignore_eos=True, seed=0)
        started_s = clock()
        engine.generate(prompts, params)
        return max(clock() - started_s, 1e-9)

    seconds([[1 % vocab]], 2)  # what is prepared at first use
    read_s = seconds([[(7 * i + 3) % vocab for i in range(num_read)]], 1)
    decode_s = seconds([[i % vocab] for i in range(batch)], num_steps)
    device = engine.target.device
    matrix = torch.ones(
        PROBE_SIZE,
        PROBE_SIZE,
        device=device,
        dtype=choose_faster_dtype(torch.bfloat16, device.type),
    )
    taken = []
    for _ in range(3):
        started_s = clock()
        (matrix @ matrix)[0, 0].item()
        taken.append(clock() - started_s)
    return Rates(
        decode_tokens_per_s=batch * num_steps / decode_s,
        prefill_tokens_per_s=num_read / read_s,
        flop_per_s=2 * PROBE_SIZE**3 / max(min(taken), 1e-9),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSizes:
    """Parameters of a draft, and products of one trained token: of its body and its output."""

    num_parameters: float
    body: float
    output: float


def read_draft_sizes(config: AlignConfig, sizes: TargetSizes) -> DraftSizes:
    """Estimate the size of what is trained."""
    arch, attached = sizes.architecture, config.attached
    width, vocab = arch.hidden_size, arch.vocab_size
    if config.method == "medusa":
        heads = attached.num_passes * width**2
        return DraftSizes(
            num_parameters=heads, body=heads, output=attached.num_passes * width * vocab
        )
    if config.method in ("eagle3", "dflash"):
        heads = attached.num_heads or arch.num_heads
        kv_heads = attached.num_kv_heads or (heads if attached.num_heads else arch.num_kv_heads)
        layers, inputs = (BLOCK_LAYERS, 1) if config.method == "dflash" else (1, 2)
        attention = inputs * width * arch.head_dim * (heads + 2 * kv_heads)
        attention += heads * arch.head_dim * width
        inner = attached.intermediate_size or sizes.intermediate_size
        body = layers * (attention + 3 * width * inner) + 3 * width**2
        output = width * min(attached.draft_vocab_size or DRAFT_VOCABULARY, vocab)
        times = attached.num_passes
        return DraftSizes(num_parameters=body + output, body=body * times, output=output * times)
    num_parameters = _count_parameters(config)
    # A teacher that caches states computes the target's logits, a third of what is trained.
    logits = width * vocab / 3
    return DraftSizes(num_parameters=num_parameters, body=num_parameters, output=logits)


def _count_parameters(config: AlignConfig) -> float:
    if config.draft is not None:
        return ModelFiles.open(config.draft).num_parameters
    return _count_shape_parameters(read_json(config.init) if config.init is not None else None)


def _count_shape_parameters(values: Any) -> float:
    """Return the parameters of a draft by its config.json; `align` says what is wrong with it."""
    if not isinstance(values, dict):
        return 0.0
    names = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")
    sizes = [size if isinstance(size := values.get(name), int) else 0 for name in names]
    width, layers, inner, vocab = sizes
    return float(layers * (4 * width**2 + 3 * width * inner) + width * vocab)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignPlan:
    """What an alignment will do, with estimates of what it takes on this machine.

    Attributes:
        num_response_tokens: that the target answers in all.
        num_learned_tokens: of them, or of records, that the draft learns in one pass.
        passes: how often the texts are read in training.
        minutes: of each phase, in order.
    """

    target: str
    method: Method
    num_parameters: int
    texts: TextSizes
    max_prompt_tokens: int
    max_tokens: int | None
    num_response_tokens: int
    num_steps: int
    tokens_per_step: int
    window: int
    passes: float
    learning_rate: float
    minutes: Mapping[str, float]
    disk_bytes: float
    memory_bytes: float

    def lines(self) -> list[str]:
        """Return the plan in words, one line per phase."""
        texts = self.texts
        written = f", written by the target: about {texts.num_texts:,} texts" * bool(
            texts.num_texts
        )
        rows = {
            "prompts": f"{texts.num_training:,}{written}",
            "responses": f"{self.num_response_tokens:,} tokens, at most {self.max_tokens} each",
            "teacher": "the target's states or distributions at every token",
            "training": f"{self.num_steps:,} steps of {self.tokens_per_step:,} tokens, the texts "
            f"{self.passes:.1f} times; learning rate {self.learning_rate:g}",
            "judging": f"on {texts.judged_on}",
        }
        lines = [f"plan: {self.method} for {self.target} ({self.num_parameters / 1e6:,.0f}M)"]
        for phase, what in rows.items():
            is_left_out = {
                "responses": not self.num_response_tokens,
                "teacher": phase not in self.minutes,
            }
            if is_left_out.get(phase):
                continue
            taken = f", ~{_format_duration(self.minutes[phase])}" if phase in self.minutes else ""
            lines.append(f"  {phase:10}{what}{taken}")
        lines += [
            f"  {'cut':10}{texts.cut_prompts_share:.0%} of the prompts to {self.max_prompt_tokens} "
            f"tokens, {texts.cut_texts_share:.0%} of the texts to a window of {self.window}",
            f"  {'in all':10}~{_format_duration(sum(self.minutes.values()))}, "
            f"{readable(int(self.disk_bytes))} of disk, {readable(int(self.memory_bytes))} of "
            "memory; estimates from a short measurement on this machine",
        ]
        return lines


def _format_duration(minutes: float) -> str:
    return f"{minutes / 60:.1f} h" if minutes >= 90 else f"{max(minutes, 1):.0f} min"


def make_plan(config: AlignConfig, sizes: TargetSizes, texts: TextSizes, rates: Rates) -> AlignPlan:
    """Work out what an alignment takes, from its settings and measured rates."""
    training, longest = config.training, config.sampling.max_tokens or config.training.window
    drafted = read_draft_sizes(config, sizes)
    response = RESPONSE_SHARE * longest
    is_answered = config.data.fixed_share < 1
    num_answered = texts.num_training * response if is_answered else 0.0
    answered_s = num_answered / rates.decode_tokens_per_s
    answered_s += texts.num_training * texts.prompt_tokens / rates.prefill_tokens_per_s
    text_tokens = min(texts.prompt_tokens + response, training.window)
    all_tokens = texts.num_training * text_tokens
    trained = training.num_steps * training.tokens_per_step * FULLNESS
    learned = response / (texts.prompt_tokens + response)
    product = 6 * (drafted.body + learned * drafted.output)
    judged = _count_judged(config, texts.num_held_out) * longest
    seconds = {
        "prompts": texts.num_texts * TURN_TOKENS / rates.decode_tokens_per_s,
        "responses": answered_s * is_answered,
        "teacher": all_tokens / rates.prefill_tokens_per_s * config.needs_teacher,
        "training": trained * product / (EFFICIENCY * rates.flop_per_s),
        "judging": judged / rates.decode_tokens_per_s,
    }
    return AlignPlan(
        target=config.target,
        method=config.method,
        num_parameters=sizes.num_parameters,
        texts=texts,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_tokens=config.sampling.max_tokens,
        num_response_tokens=round(num_answered),
        num_steps=training.num_steps,
        tokens_per_step=training.tokens_per_step,
        window=training.window,
        passes=trained / all_tokens,
        learning_rate=training.learning_rate,
        minutes={phase: spent_s / 60 for phase, spent_s in seconds.items() if spent_s},
        disk_bytes=_estimate_disk(config, sizes, drafted, all_tokens, learned),
        memory_bytes=_estimate_memory(config, sizes, drafted),
    )


def _count_judged(config: AlignConfig, num_held_out: int) -> int:
    """Return how many responses all judgements decode."""
    evaluation = config.evaluation
    during = (evaluation.num_evaluations + 1) * min(evaluation.max_prompts, num_held_out)
    temperatures = {*evaluation.temperatures, config.sampling.temperature}
    return during + 2 * num_held_out * len(temperatures)


def _estimate_disk(
    config: AlignConfig,
    sizes: TargetSizes,
    drafted: DraftSizes,
    num_tokens: float,
    learned_share: float,
) -> float:
    """Return the bytes of the teacher's cache, of the snapshots and of the checkpoint."""
    state = sizes.architecture.hidden_size * sizes.dtype.itemsize
    if not config.needs_teacher or config.teacher.teacher == "model":
        cached = 0.0
    elif config.is_attached:
        cached = num_tokens * state * (1 if config.method == "medusa" else 4)
    else:
        is_choice = config.sampling.greedy and config.teacher.teacher == "auto"
        cached = num_tokens * learned_share * (CHOICE_BYTES if is_choice else state)
    snapshots = (config.evaluation.num_evaluations + 2) * 2 * drafted.num_parameters
    return cached + snapshots + TRAINED_BYTES * drafted.num_parameters


def _estimate_memory(config: AlignConfig, sizes: TargetSizes, drafted: DraftSizes) -> float:
    """Return the bytes of the target in the engine, and of what is trained beside it."""
    arch, engine = sizes.architecture, config.sized_engine
    geometry = geometry_of(
        arch,
        num_slots=engine.max_batch,
        capacity=min(engine.max_context, arch.max_positions),
        max_staged_rows=engine.num_speculative_tokens + 1,
        dtype=sizes.dtype,
    )
    needed = estimate(sizes.num_parameters, arch, geometry).total_bytes
    shared = 2 * arch.vocab_size * arch.hidden_size * 4
    return needed + TRAINED_BYTES * drafted.num_parameters + shared


def fill_in(
    config: AlignConfig,
    chosen: SizedDefaults,
    texts: TextSizes,
    training: Mapping[str, float | None],
) -> AlignConfig:
    """Return the settings with those of the target's size where a flag of `training` is None."""
    given = {name: value for name, value in training.items() if value is not None}
    sized = {
        "window": chosen.window,
        "tokens_per_step": chosen.tokens_per_step,
        "learning_rate": chosen.learning_rate,
        **given,
    }
    filled = replace(config.training, **sized)  # type: ignore[arg-type]  # values of several types
    if "num_steps" not in given:
        longest = config.sampling.max_tokens or filled.window
        num_tokens = min(texts.prompt_tokens + longest, filled.window) * texts.num_training
        num_steps = choose_num_steps(num_tokens, filled.tokens_per_step)
        filled = replace(filled, num_steps=num_steps)
    return replace(config, training=filled)
