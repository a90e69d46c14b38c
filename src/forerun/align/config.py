"""Settings of an alignment: one torch-free dataclass per stage; flags are generated from them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

from forerun.engine.config import EngineConfig
from forerun.errors import InvalidRequest, Range, check_ranges
from forerun.sampling.config import SamplingParams, draft_params

ObjectiveName = Literal["ce", "fkl", "nla"]
TeacherKind = Literal["auto", "model", "hidden"]
Export = Literal["vllm", "sglang", "llama.cpp"]
Source = Literal["target", "fixed"]
"""What wrote a training text: the target, or a data set."""
Method = Literal["draft_model", "eagle3", "dflash", "medusa"]
"""What is trained: a model of its own, or a head that reads the target's hidden states."""

BLOCK_LAYERS = 2
"""Decoder layers of a fresh DFlash network."""
LEFT_OUT = ("out", "engine", "export")
"""Settings that do not change the trained draft, only where and how fast it is made."""
FREE_TRAINING_SETTINGS = ("rows_per_pass", "checkpoint_every_s")
"""Training settings that may differ when a run is resumed, because they change no step."""
LAYER_SETTINGS = (
    "draft_vocab_size",
    "feature_layers",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
)
"""Settings of `AttachedConfig` for heads with decoder layers; Medusa heads have none."""

TRAINING_RANGES = (
    Range("num_steps", 1, integer=True),
    Range("tokens_per_step", 1, integer=True),
    Range("window", 2, integer=True),
    Range("rows_per_pass", 1, integer=True),
    Range("learning_rate", 0, above_low=True),
    Range("warmup_share", 0, 1),
    Range("checkpoint_every_s", 0),
    Range("training_seed", 0, integer=True),
)
EVALUATION_RANGES = (
    Range("num_speculative_tokens", 1, integer=True),
    Range("num_evaluations", 1, integer=True),
    Range("max_prompts", 2, integer=True),
)
ATTACHED_RANGES = (
    Range("num_passes", 1, integer=True),
    Range("pass_decay", 0, 1, above_low=True),
    Range("draft_vocab_size", 1, integer=True, optional=True),
    Range("intermediate_size", 1, integer=True, optional=True),
    Range("num_heads", 1, integer=True, optional=True),
    Range("num_kv_heads", 1, integer=True, optional=True),
)
DATA_RANGES = (Range("max_prompt_tokens", 1, integer=True), Range("fixed_share", 0, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Texts that the draft is trained on, and prompts that it is judged on."""

    prompts: Path
    """A .jsonl, .json, .parquet or .txt file of prompts or conversations, or a folder of them."""
    fixed_share: float = 0.0
    """Share of the training tokens taken from responses that the records have."""
    response_temperature: float | None = None
    """Temperature the responses are drawn at; by default the deployment's.
    Greedy responses are few and loop: at temperature 0, draw at 1 and learn the choices there."""
    held_out: Path | None = None
    """Prompts to judge on; by default a share of `prompts`."""
    held_out_share: float = 0.1
    """Share of the prompts kept for judging, chosen by their hash."""
    max_prompt_tokens: int = 512
    """Longer prompts are cut at their beginning."""
    raw: bool = False
    """Continue texts as they are; by default a chat model reads them as a user's messages."""

    def __post_init__(self) -> None:
        check_ranges(self, *DATA_RANGES)

    @property
    def shares(self) -> dict[Source, float]:
        """Share of the training tokens by source; the target writes the remainder."""
        shares: dict[Source, float] = {
            "fixed": self.fixed_share,
            "target": 1.0 - self.fixed_share,
        }
        return {source: share for source, share in shares.items() if share > 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherConfig:
    """Source of the target's probabilities during training."""

    teacher: TeacherKind = "auto"
    """model: rerun the target at every step; hidden: cache its last hidden states;
    auto: at temperature 0 cache its choices, otherwise hidden if it fits and model if not."""
    cache_dir: Path | None = None
    """Where caches are kept; by default inside the output folder."""
    max_cache_bytes: int | None = None
    """Most bytes a cache may take; by default nine tenths of what the disk has free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig:
    """Loss that is minimised at every learned position."""

    objective: ObjectiveName | Literal["auto"] = "auto"
    """ce: text alone; fkl: KL of target and draft; nla: -log alpha.
    auto: what suits the deployed temperature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedConfig:
    """Shape and training of a head on the target (methods eagle3, dflash and medusa)."""

    num_passes: int = 5
    """Tokens that a row learns to predict: passes of the unroll, rows of a block, Medusa heads."""
    pass_decay: float = 0.8
    """Weight of a pass over that of the one before it; 1 weighs all alike."""
    draft_vocab_size: int | None = None
    """eagle3, dflash: tokens that can be drafted, the most frequent of the responses. By default as
    many as cover 99.5% of answers to other prompts. With all tokens of the target dflash uses its
    output matrix. The vocabulary of an EAGLE-3 head to go on from is chosen again if this is
    another size than its own."""
    feature_layers: tuple[int, ...] = ()
    """eagle3, dflash: layers of the target whose input is read; by default 2, L/2 and L - 3."""
    intermediate_size: int | None = None
    """eagle3, dflash: width of the feed-forward; by default the target's."""
    num_heads: int | None = None
    """eagle3, dflash: attention heads; by default the target's."""
    num_kv_heads: int | None = None
    """eagle3, dflash: key/value heads; by default the target's."""
    norm_before_residual: bool = True
    """eagle3: the residual carries the normed state, which learns faster: the target's states are
    many times larger than what a fresh layer adds. Older versions of SGLang ignore the flag."""

    def __post_init__(self) -> None:
        check_ranges(self, *ATTACHED_RANGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Settings of the training loop and its optimiser."""

    num_steps: int = 1000
    """Optimiser steps."""
    tokens_per_step: int = 8192
    """Tokens per optimiser step, over all processes and accumulated passes."""
    window: int = 512
    """Tokens per packed row; longer samples are cut."""
    rows_per_pass: int = 8
    """Packed rows per forward pass of one process; passes are accumulated up to a step."""
    learning_rate: float = 1e-3
    """Peak learning rate after warm-up; it follows a cosine to a tenth of it."""
    warmup_share: float = 0.05
    """Share of the steps with linear warm-up."""
    checkpoint_every_s: float = 300.0
    """Seconds between checkpoints."""
    training_seed: int = 0
    """Seed of the order of rows and of fresh weights."""

    def __post_init__(self) -> None:
        check_ranges(self, *TRAINING_RANGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """Settings for judging drafts with the engine's own verifier: K, prompts, and how often."""

    num_speculative_tokens: int = 5
    """Tokens drafted per step (K)."""
    num_evaluations: int = 8
    """Judgements during training, evenly spaced, the last at its end, besides the one before it."""
    max_prompts: int = 64
    """Most held-out prompts of a judgement during training; the final one uses all."""
    temperatures: tuple[float, ...] = ()
    """Temperatures, beside the deployed one, at which the first and the kept draft are judged."""

    def __post_init__(self) -> None:
        check_ranges(self, *EVALUATION_RANGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignConfig:
    """All settings of one alignment."""

    target: str
    """Folder, hub name or zoo: name of the target."""
    method: Method = "draft_model"
    """draft_model: a model of its own; eagle3, dflash, medusa: a head on the target's states."""
    draft: str | None = None
    """The draft or head to start from; None if `init` is given, or for a fresh head."""
    init: Path | None = None
    """config.json of a draft to make from nothing, in the target's vocabulary."""
    dtype: str = "auto"
    """Dtype of the target: auto (as stored), bfloat16, float16 or float32."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    out: Path = Path("aligned")
    """Folder for the draft (out/draft), data, caches, checkpoints, metrics and report."""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=128))
    """Parameters of the deployment: responses are drawn under them and the draft judged."""
    data: DataConfig
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    attached: AttachedConfig = field(default_factory=AttachedConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(controller="fixed"))
    export: tuple[Export, ...] = ()
    """Serving configurations written beside the draft."""

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other (InvalidRequest)."""
        if self.draft is not None and Path(self.draft).resolve() == (self.out / "draft").resolve():
            # A run that is interrupted begins with it again.
            raise InvalidRequest(
                f"the draft {self.draft} is to be replaced by what is learned; give another --out"
            )
        self._check_effect()
        if self.is_attached:
            self._check_attached()

    def _check_effect(self) -> None:
        """Refuse settings that would change nothing beside the others."""
        data, attached = self.data, self.attached
        settings = tuple(item.name for item in fields(AttachedConfig))
        is_eagle3 = self.method == "eagle3"
        has_layers = is_eagle3 or self.method == "dflash"
        for part, names, is_used, reason in (
            (
                self.sampling,
                ("n", "logprobs", "prompt_logprobs"),
                False,
                "responses are single texts",
            ),
            (attached, settings, self.is_attached, "it is for --method eagle3, dflash and medusa"),
            (attached, LAYER_SETTINGS, has_layers, "it is for --method eagle3 and dflash"),
            (attached, ("norm_before_residual",), is_eagle3, "it is for --method eagle3"),
            (data, ("held_out_share",), data.held_out is None, "--held-out names the prompts"),
        ):
            defaults = {item.name: item.default for item in fields(part)}
            for name in () if is_used else names:
                if (value := getattr(part, name)) != defaults[name]:
                    raise InvalidRequest(
                        f"{name} is {value!r}, which would change nothing here: {reason}; "
                        "leave it out"
                    )

    def _check_attached(self) -> None:
        if self.method == "medusa" and self.draft is not None:
            raise InvalidRequest(
                "--draft does not go with --method medusa: its heads are made fresh"
            )
        if self.init is not None:
            raise InvalidRequest(
                f"--init does not go with --method {self.method}: a head's shape is set by flags "
                "such as --intermediate-size"
            )
        k, most = self.evaluation.num_speculative_tokens, self.attached.num_passes
        if self.method == "dflash" and k > most:
            raise InvalidRequest(
                f"num_speculative_tokens is {k}, but a network trained with num_passes={most} "
                f"drafts at most {most} tokens: give --k {most} or --num-passes {k}"
            )
        if not self.needs_teacher:
            raise InvalidRequest(
                f"--objective {self.objective_name} reads text alone, but --method {self.method} "
                "learns the target's distributions; take another objective, such as fkl"
            )

    @property
    def sized_engine(self) -> EngineConfig:
        """Settings of the engine, with K, and a context no longer than any text here."""
        context = self.engine.max_context
        if self.sampling.max_tokens is not None:
            longest = self.data.max_prompt_tokens + self.sampling.max_tokens
            context = min(context, max(self.training.window, longest))
        k = self.evaluation.num_speculative_tokens
        return replace(self.engine, num_speculative_tokens=k, max_context=context)

    @property
    def is_attached(self) -> bool:
        """Whether the trained draft is a head that reads the target's hidden states."""
        return self.method != "draft_model"

    @property
    def draft_temperature(self) -> float:
        """Temperature at which the deployed draft proposes tokens, used in training too.

        A head for greedy decoding learns the distribution at temperature 1, which tells more.
        """
        deployed = draft_params(self.sampling).temperature
        return deployed or float(self.is_attached)

    @property
    def objective_name(self) -> ObjectiveName:
        """The objective; "auto" means forward KL for a head, as in EAGLE."""
        chosen = self.objective.objective
        if chosen != "auto":
            return chosen
        return "fkl" if self.is_attached else suited_objective(self.draft_temperature)

    @property
    def needs_teacher(self) -> bool:
        """Whether the objective needs the target's distributions beside the text."""
        return self.objective_name != "ce"


def suited_objective(temperature: float) -> ObjectiveName:
    """Return the objective that "auto" selects at this draft temperature.

    A greedy draft is accepted where its most likely token is the target's, so it learns the
    target's distribution itself (forward KL; for a greedy target that is cross-entropy on its
    choices). A sampled draft is accepted with probability alpha, whose likelihood NLA maximises.
    benchmarks/align compares both with other divergences.
    """
    return "fkl" if temperature == 0 else "nla"
