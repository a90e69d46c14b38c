"""Training loop in one process or several, whose steps do not depend on their number."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    broadcast_object_list,
)
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW, Optimizer

from forerun.align.config import FREE_TRAINING_SETTINGS, TrainingConfig
from forerun.align.samples import PackedBatch, Packing
from forerun.align.target import choose_faster_dtype
from forerun.align.teachers import Teacher
from forerun.align.workspace import StepMetrics, differences
from forerun.atomic_write import atomic_write, remove_unfinished
from forerun.errors import InvalidCheckpoint, TrainingDiverged
from forerun.measure.rigs import torch_threads
from forerun.models.stored_tensors import writing_tensors

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.01
"""Of matrices."""
MOMENTUM = 0.95
MUON_RATE = 5.0
"""Learning rate of matrices under Muon, over that of the parameters under AdamW. At 1 a head for a
135M target learned more slowly than under AdamW alone; see benchmarks/align/real-model.md."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration that brings all singular values near 1 (Jordan et al., Muon, 2024)."""
NUM_ITERATIONS = 5


class MuonAdamW(AdamW):
    """AdamW, except for groups with `muon` set, whose momentum is orthogonalised before a step.

    Their learning rate is `MUON_RATE` times that of the group, and the root mean square of an
    update 0.2 times that, as AdamW's is of its rate (Liu et al., arXiv 2502.16982, section 2.2).
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # it takes no closure
        """Update all parameters that have a gradient."""
        groups = self.param_groups
        for group in groups:
            if group["muon"]:
                for matrix in group["params"]:
                    if matrix.grad is not None:
                        self._step_matrix(matrix, matrix.grad, MUON_RATE * group["lr"])
        self.param_groups = [group for group in groups if not group["muon"]]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _step_matrix(self, matrix: Tensor, gradient: Tensor, learning_rate: float) -> None:
        state = self.state[matrix]
        if not state:
            state["step"] = torch.zeros(())  # which AdamW expects of every parameter it restores
            state["momentum"] = torch.zeros_like(matrix)
        momentum: Tensor = state["momentum"]
        momentum.lerp_(gradient, 1 - MOMENTUM)
        direction = gradient.lerp(momentum, MOMENTUM)  # Nesterov's
        update = shard_like(orthogonalise(gather_shards(direction)), matrix)
        matrix.mul_(1 - learning_rate * WEIGHT_DECAY)
        matrix.add_(update, alpha=-0.2 * max(matrix.shape) ** 0.5 * learning_rate)


def gather_shards(tensor: Tensor) -> Tensor:
    """Return a tensor with its shards gathered; all processes must call it for the same tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Move a tensor to a parameter's device and shard it like the parameter."""
    tensor = tensor.to(like.device)
    if isinstance(like, DTensor):
        # Every process has the whole tensor, so none has to send it.
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return tensor


def orthogonalise(matrix: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
    """Return a matrix with the same singular vectors, whose singular values are all near 1."""
    a, b, c = COEFFICIENTS
    wide = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    result: Tensor = wide / wide.norm().clamp(min=1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = result @ result.mT
        result = torch.addmm(result, torch.addmm(gram, gram, gram, beta=b, alpha=c), result, beta=a)
    return result.mT if matrix.shape[0] > matrix.shape[1] else result


def make_optimiser(
    module: nn.Module, learning_rate: float, muon: Iterable[nn.Parameter] = ()
) -> MuonAdamW:
    """Build the optimiser; matrices have weight decay, norms and biases do not."""
    inner = {id(parameter) for parameter in muon}
    trained = [p for p in module.parameters() if p.requires_grad]
    outer = [p for p in trained if id(p) not in inner]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if id(p) in inner], "muon": True},
        {"params": [p for p in outer if p.ndim > 1], "muon": False, "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in outer if p.ndim <= 1], "muon": False, "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    return MuonAdamW(filled, lr=learning_rate, betas=BETAS, fused=True)


WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""Prefixes that activation checkpointing and compilation add to the names of parameters."""


def _find_trained(module: nn.Module) -> dict[str, nn.Parameter]:
    found = {}
    for name, parameter in module.named_parameters():
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        if parameter.requires_grad:
            found[name] = parameter
    return found


def save_checkpoint(
    path: Path,
    module: nn.Module,
    optimiser: Optimizer,
    *,
    step: int,
    identity: Mapping[str, str],
    is_writer: bool,
) -> None:
    """Write the state after `step` steps; an earlier file is replaced atomically."""
    tensors = {}
    for name, tensor in _list_tensors(module, optimiser):
        gathered = gather_shards(tensor.detach())
        if is_writer:
            tensors[name] = gathered.cpu().clone()
    if not is_writer:
        return
    remove_unfinished(path)  # only this process writes it, under the lock of the folder
    with atomic_write(path) as scratch, writing_tensors():
        metadata = {
            "step": str(step),
            "identity": json.dumps(dict(identity)),
            "sha256": _hash_tensors(tensors),
        }
        save_file(tensors, scratch, metadata)


def _hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, types, shapes and values of tensors."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _list_tensors(module: nn.Module, optimiser: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in _find_trained(module).items():
        yield f"weights/{name}", parameter
        for key, value in optimiser.state[parameter].items():
            yield f"optimiser/{name}/{key}", value


def load_checkpoint(
    path: Path, module: nn.Module, optimiser: Optimizer, *, identity: Mapping[str, str]
) -> int:
    if not path.exists():
        return 0
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if different := differences(json.loads(metadata["identity"]), identity):
                raise InvalidCheckpoint(
                    f"{path} is of another run ({'; '.join(different)}); use its settings or "
                    "another output folder"
                )
            names = sorted(file.keys())
            tensors = {name: file.get_tensor(name) for name in names}
            if metadata["sha256"] != _hash_tensors(tensors):
                raise ValueError("its content is damaged: the hash does not match")
            for name, parameter in _find_trained(module).items():
                with torch.no_grad():
                    parameter.copy_(shard_like(tensors[f"weights/{name}"], parameter))
                prefix = f"optimiser/{name}/"
                for key in [name for name in names if name.startswith(prefix)]:
                    value = tensors[key]
                    optimiser.state[parameter][key.removeprefix(prefix)] = (
                        shard_like(value, parameter) if value.ndim else value.to(parameter.device)
                    )
            return int(metadata["step"])
    except (SafetensorError, OSError, KeyError, ValueError, AttributeError) as error:
        raise InvalidCheckpoint(
            f"{path} cannot be read ({error}); delete it to start again"
        ) from error


MadeT = TypeVar("MadeT")

COLLECTIVE_TIMEOUT = timedelta(days=7)
"""Other processes wait while the main one generates and judges, however long that takes."""


def connect_processes(device: str) -> PartialState:
    """Connect all launched processes, of which this one may be the only one."""
    timeout = InitProcessGroupKwargs(timeout=COLLECTIVE_TIMEOUT).to_kwargs()
    return PartialState(cpu=_is_cpu(device), **timeout)


def _is_cpu(device: str) -> bool:
    # Processes without GPUs connect only if Accelerate is given cpu=True.
    return device == "cpu" or not torch.accelerator.is_available()


def choose_precision(device: str) -> str:
    """Return "bf16" where the device computes products faster in it than in fp32, or else "no"."""
    suited = choose_faster_dtype(torch.bfloat16, "cpu" if _is_cpu(device) else device)
    return "bf16" if suited == torch.bfloat16 else "no"


def make_accelerator(device: str = "auto", mixed_precision: str | None = None) -> Accelerator:
    """Return the accelerator over all launched processes, or over this process alone.

    Without a precision the main process chooses the faster one for all.
    """
    state = connect_processes(device)
    if mixed_precision is None:
        mixed_precision = from_main(state, lambda: choose_precision(device))
    accelerator = Accelerator(mixed_precision=mixed_precision, cpu=_is_cpu(device))
    if accelerator.is_fsdp2:
        configure_sharding(accelerator.state.fsdp_plugin, mixed_precision)
    return accelerator


def configure_sharding(plugin: FullyShardedDataParallelPlugin, mixed_precision: str) -> None:
    """Set the FSDP2 options that this training requires, overriding `accelerate config`.

    Every process reads the draft: the other way leaves all but one with empty models, and each of
    them checks the draft and reads the target. Gradients are added up in fp32, and the loss stays
    in it: by itself Accelerate rounds both to bf16.
    """
    plugin.cpu_ram_efficient_loading = False
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # transformers reads this
    if mixed_precision == "bf16":
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )


def from_main(state: PartialState | Accelerator, make: Callable[[], MadeT]) -> MadeT:
    """Compute a value in the main process and send it to all processes."""
    made = [make() if state.is_main_process else None]
    if state.num_processes > 1:
        broadcast_object_list(made)
    assert made[0] is not None
    return made[0]


SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Records the first SIGINT or SIGTERM; the second one has its usual effect.

    Only the main thread may handle signals: elsewhere nothing is noted.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._before = {name: signal.signal(name, self._note) for name in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        while self._before:
            name, handler = self._before.popitem()
            signal.signal(name, handler)


CHECKPOINT = "checkpoint.safetensors"


class Trainer:
    """Trains a draft on this process's share of every step's rows.

    A step is the same mean over the same rows with one process or many: its rows are numbered,
    every process takes an equal run of them, and the loss is divided by the learned rows of all.

    Args:
        muon: matrices of the module that learn by Muon; the others learn by AdamW.

    Attributes:
        num_threads: of torch while it trains; the native runner of a target leaves torch one.
    """

    def __init__(  # noqa: PLR0913 (what is trained, by what, and where)
        self,
        *,
        config: TrainingConfig,
        module: nn.Module,
        teacher: Teacher | None,
        accelerator: Accelerator,
        folder: Path,
        identity: Mapping[str, str],
        muon: Sequence[nn.Parameter] = (),
    ) -> None:
        self.config = config
        self.num_threads = torch.get_num_threads()
        self.module = module
        self.teacher = teacher
        self.accelerator = accelerator
        self.path = folder / CHECKPOINT
        self.identity = decisive(config) | dict(identity)
        self.step = 0
        # Replicates or shards the module in place, and moves it to its device.
        self._wrapped: nn.Module
        self._wrapped, self.optimiser = accelerator.prepare(
            module, make_optimiser(module, config.learning_rate, muon)
        )
        self._saved_s = time.monotonic()

    @property
    def rows_per_step(self) -> int:
        world: int = self.accelerator.num_processes
        wanted = max(1, self.config.tokens_per_step // self.config.window)
        return math.ceil(wanted / world) * world

    def resume(self) -> int:
        """Resume from the checkpoint if there is one; returns the steps done."""
        optimiser = self.optimiser.optimizer
        self.step = load_checkpoint(self.path, self.module, optimiser, identity=self.identity)
        return self.step

    def run(self, rows: Packing, until_step: int, on_step: Callable[[StepMetrics], None]) -> None:
        """Train until the given number of steps is done, and write a checkpoint."""
        if self.step >= until_step:  # nothing has changed since the checkpoint
            return
        self._wrapped.train()
        with torch_threads(self.num_threads), StopSignal() as interruption:
            while self.step < until_step:
                started_s = time.monotonic()
                late = started_s - self._saved_s > self.config.checkpoint_every_s
                batches = [rows.batch(first, number) for first, number in self._list_passes()]
                mine = sum(int(batch.predicts.sum()) for batch in batches)
                # All processes stop or save if one of them has to.
                learned, requested, due = self._sum(mine, interruption.requested, late)
                on_step(self._optimise(batches, int(learned), started_s))
                if requested or due:
                    self.save()
                if requested:
                    raise KeyboardInterrupt
        self.save()

    def save(self) -> None:
        """Write a checkpoint; all processes must call this."""
        save_checkpoint(
            self.path,
            self.module,
            self.optimiser.optimizer,
            step=self.step,
            identity=self.identity,
            is_writer=self.accelerator.is_main_process,
        )
        self._saved_s = time.monotonic()

    def weights(self) -> dict[str, Tensor]:
        """Return the trained weights by name, in fp32, in the main process; {} in the others.

        Every process must call.
        """
        gathered = {}
        for name, parameter in _find_trained(self.module).items():
            tensor = gather_shards(parameter.detach())
            if self.accelerator.is_main_process:
                gathered[name] = tensor.cpu().clone()
        return gathered

    def _list_passes(self) -> Sequence[tuple[int, int]]:
        share = self.rows_per_step // self.accelerator.num_processes
        first = self.step * self.rows_per_step + self.accelerator.process_index * share
        most = self.config.rows_per_pass
        return [(first + done, min(most, share - done)) for done in range(0, share, most)]

    def _optimise(
        self, batches: Sequence[PackedBatch], learned: int, started_s: float
    ) -> StepMetrics:
        losses, alphas = self._backward(batches, learned)
        loss, alpha = (total / max(1, learned) for total in self._sum(losses, alphas))
        trained = [p for p in self.module.parameters() if p.requires_grad]
        norm = float(gather_shards(nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM)))
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise TrainingDiverged(
                f"step {self.step + 1}: the loss is {loss}, the norm of its gradient {norm}; the "
                f"last checkpoint ({self.path}) is as it was. Try a smaller learning_rate than "
                f"{self.config.learning_rate}, or a longer warm-up"
            )
        learning_rate = learning_rate_at(self.step, self.config)
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.step += 1
        return StepMetrics(
            step=self.step,
            loss=loss,
            acceptance_probability=None if self.teacher is None else alpha,
            num_learned=learned,
            num_tokens=self.rows_per_step * self.config.window,
            grad_norm=norm,
            learning_rate=learning_rate,
            duration_s=time.monotonic() - started_s,
        )

    def _backward(self, batches: Sequence[PackedBatch], learned: int) -> tuple[float, float]:
        """Accumulate gradients; returns the sums of loss and alpha over this process's rows."""
        # Gradients are averaged over processes; this makes them the sum over all their rows.
        scale = self.accelerator.num_processes / max(1, learned)
        sums = torch.zeros(2, device=self.accelerator.device)
        for number, batch in enumerate(batches, start=1):
            is_last = number == len(batches)
            with nullcontext() if is_last else self.accelerator.no_sync(self._wrapped):
                batch = batch.to(self.accelerator.device)
                rows = None if self.teacher is None else self.teacher.rows(batch)
                loss, alpha = self._wrapped(batch, rows)
                self.accelerator.backward(loss * scale)
            sums += torch.stack([loss.detach(), alpha])
        return float(sums[0]), float(sums[1])

    def _sum(self, *values: float) -> list[float]:
        if self.accelerator.num_processes == 1:
            return [float(value) for value in values]
        mine = torch.tensor(values, dtype=torch.float64, device=self.accelerator.device)
        summed = self.accelerator.reduce(mine, reduction="sum")
        return [float(value) for value in summed]


def decisive(config: TrainingConfig) -> dict[str, str]:
    """Return the settings that influence the result of training steps, as text."""
    return {
        name: str(v) for name, v in asdict(config).items() if name not in FREE_TRAINING_SETTINGS
    }


FINAL_SHARE = 0.1
"""Learning rate at the last step, as a share of the peak."""
MAX_GRAD_NORM = 1.0
"""Gradients are clipped to this norm."""


def learning_rate_at(step: int, config: TrainingConfig) -> float:
    """Return the learning rate of a step counted from 0: linear warm-up, cosine to a tenth."""
    warmup_steps = math.ceil(config.warmup_share * config.num_steps)
    if step < warmup_steps:
        return config.learning_rate * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, config.num_steps - 1 - warmup_steps)
    left = (1 + math.cos(math.pi * min(1.0, done))) / 2
    return config.learning_rate * (FINAL_SHARE + (1 - FINAL_SHARE) * left)
