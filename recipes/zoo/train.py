"""Train one Llama-shaped model on a token file: seeded, resumable, pausable.

The run is a function of its `TrainConfig`: the data order is a seeded permutation of windows, and a
checkpoint holds weights, optimiser state and step, so that an interrupted run goes on as if it had
not been. While the pause file exists training waits, which leaves the machine to a benchmark.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from widen import widen

HEAD_CHUNK_ROWS = 256  # 256 x 8,192 fp32 logits stay in the last-level cache


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Shape, schedule and data of one run."""

    name: str
    tokens: str  # token file under the data folder
    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 64
    context: int = 1024
    window: int = 512
    micro_batch: int = 4
    accumulate: int = 4
    num_steps: int = 3000
    warmup_steps: int = 100
    decay_share: float = 0.35  # linear to zero over the last part of the run
    muon_lr: float = 4e-3
    adam_lr: float = 4e-3
    weight_decay: float = 0.05
    attention: str = "eager"  # measured faster than sdpa for training on CPU at width 256
    seed: int = 0
    edits_every: int = 0  # each window whose number divides by it is one of edits.npy; 0: none
    edits_from: int = 0  # from this step on
    start: str = ""  # folder of a model of half the width to start from; "": random weights


def build_model(config: TrainConfig) -> LlamaForCausalLM:
    """A freshly initialised model of the configured shape."""
    torch.manual_seed(config.seed)
    shape = LlamaConfig(
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=8192,
        max_position_embeddings=config.context,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=config.attention,
    )
    model = LlamaForCausalLM(shape)
    if config.start:
        narrow = LlamaForCausalLM.from_pretrained(config.start, dtype=torch.float32)
        widen(narrow, model, config.seed)
    return model


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of tied-head logits, chunk by chunk, gradients formed on the way."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:  # noqa: ANN001
        head = weight.to(hidden.dtype)
        grad_hidden, grad_head = torch.empty_like(hidden), torch.zeros_like(weight)
        loss = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, len(hidden), HEAD_CHUNK_ROWS):
            rows = slice(start, start + HEAD_CHUNK_ROWS)
            logits = (hidden[rows] @ head.T).float()
            log_norm = torch.logsumexp(logits, 1, keepdim=True)
            label = labels[rows, None]
            loss += (log_norm - logits.gather(1, label)).sum()
            grad = (logits - log_norm).exp_()
            grad.scatter_add_(1, label, -torch.ones_like(label, dtype=grad.dtype))
            grad = grad.to(hidden.dtype)
            grad_hidden[rows] = grad @ head
            grad_head += grad.T @ hidden[rows]
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.num_rows = len(hidden)
        return loss / len(hidden)

    @staticmethod
    def backward(ctx, grad: Tensor):  # noqa: ANN001, ANN205
        grad_hidden, grad_head = ctx.saved_tensors
        scale = grad / ctx.num_rows
        return grad_hidden * scale, grad_head * scale, None


class Optimisers:
    """Muon for the matrices inside layers, AdamW for embedding and norms."""

    def __init__(self, model: LlamaForCausalLM, config: TrainConfig) -> None:
        named = dict(model.named_parameters())
        matrices = [p for n, p in named.items() if p.ndim == 2 and "embed" not in n]
        rest = [p for n, p in named.items() if not (p.ndim == 2 and "embed" not in n)]
        self.names = {p: n for n, p in named.items()}
        self.config = config
        self.muon = torch.optim.Muon(
            matrices,
            lr=config.muon_lr,
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        self.adam = torch.optim.AdamW(
            rest, lr=config.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def step(self, scale: float) -> None:
        for optimiser, lr in ((self.muon, self.config.muon_lr), (self.adam, self.config.adam_lr)):
            optimiser.param_groups[0]["lr"] = lr * scale
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        out = {}
        for kind, optimiser in (("muon", self.muon), ("adam", self.adam)):
            for param, state in optimiser.state.items():
                for key, value in state.items():
                    out[f"{kind}/{self.names[param]}/{key}"] = torch.as_tensor(value).clone()
        return out

    def load(self, tensors: dict[str, Tensor]) -> None:
        params = {name: p for p, name in self.names.items()}
        for path, value in tensors.items():
            kind, name, key = path.split("/")
            optimiser = self.muon if kind == "muon" else self.adam
            optimiser.state[params[name]][key] = value


def schedule(config: TrainConfig, step: int) -> float:
    """Warm-up, constant, linear decay to zero; before decay starts the run may be lengthened."""
    decay_start = config.num_steps * (1 - config.decay_share)
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if step < decay_start:
        return 1.0
    return (config.num_steps - step) / (config.num_steps - decay_start)


class Windows:
    """Seeded order of fixed windows over a token file; epoch after epoch, each newly shuffled."""

    def __init__(self, path: Path, window: int, seed: int) -> None:
        self.tokens = np.load(path, mmap_mode="r")
        self.window, self.seed = window, seed
        self.per_epoch = (len(self.tokens) - 1) // window
        self.epoch, self.order = -1, np.empty(0, dtype=np.int64)
        self.rows, self.every, self.first = np.empty(0), 0, 0

    def mix_in(self, rows: np.ndarray, every: int, first: int) -> None:
        """From window number `first` on, replace each whose number divides by `every`."""
        self.rows, self.every, self.first = rows, every, first

    def batch(self, first: int, size: int) -> Tensor:
        """Windows number `first` to `first + size` of the run, shape (size, window + 1)."""
        rows = []
        for number in range(first, first + size):
            if self.every and number >= self.first and number % self.every == 0:
                rows.append(self.rows[number // self.every % len(self.rows)].astype(np.int64))
                continue
            epoch, index = divmod(number, self.per_epoch)
            if epoch != self.epoch:
                rng = np.random.default_rng([self.seed, epoch])
                self.epoch, self.order = epoch, rng.permutation(self.per_epoch)
            start = int(self.order[index]) * self.window
            rows.append(self.tokens[start : start + self.window + 1].astype(np.int64))
        return torch.from_numpy(np.stack(rows))


def save_checkpoint(out: Path, model: LlamaForCausalLM, optimisers: Optimisers, step: int) -> None:
    """Weights, optimiser state and step in one safetensors file, replaced atomically."""
    tensors = {f"model/{n}": p.detach().clone() for n, p in model.named_parameters()}
    tensors |= optimisers.tensors() | {"step": torch.tensor(step)}
    save_file(tensors, out / "checkpoint.tmp")
    (out / "checkpoint.tmp").replace(out / "checkpoint.safetensors")


def load_checkpoint(out: Path, model: LlamaForCausalLM, optimisers: Optimisers) -> int:
    """Restore the checkpoint under `out` if there is one; returns the step to go on from."""
    path = out / "checkpoint.safetensors"
    if not path.exists():
        return 0
    tensors = load_file(path)
    params = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in tensors.items():
            if name.startswith("model/"):
                params[name.removeprefix("model/")].copy_(value)
    optimisers.load({n: v for n, v in tensors.items() if n.startswith(("muon/", "adam/"))})
    return int(tensors["step"])


def wait_while_paused(pause_file: Path) -> None:
    while pause_file.exists():
        time.sleep(2)


def held_out_bits_per_byte(model: LlamaForCausalLM, data: Path, window: int = 512) -> float:
    """Bits per UTF-8 byte on the held-out modules, non-overlapping windows, bf16 as shipped."""
    tokens = np.load(data / "held_out.npy").astype(np.int64)
    num_bytes = json.loads((data / "held_out.json").read_text())["num_bytes"]
    nats = 0.0
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        for start in range(0, len(tokens) - 1, window):
            ids = torch.from_numpy(tokens[start : start + window + 1])[None]
            logits = model(input_ids=ids[:, :-1]).logits.float()
            nats += float(F.cross_entropy(logits[0], ids[0, 1:], reduction="sum"))
    return nats / math.log(2) / num_bytes


def train(config: TrainConfig, data: Path, out: Path, checkpoint_every_s: float = 300.0) -> Path:
    """Run (or resume) `config`; returns the folder of the finished model in Hugging Face format."""
    out.mkdir(parents=True, exist_ok=True)
    final = out / "model"
    if (final / "model.safetensors").exists():
        return final
    (out / "config.json").write_text(json.dumps(asdict(config), indent=1))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_model(config).to(device)
    optimisers = Optimisers(model, config)
    step = load_checkpoint(out, model, optimisers)
    windows = Windows(data / config.tokens, config.window, config.seed)
    if config.edits_every:
        per_step = config.accumulate * config.micro_batch
        edits = np.load(data / "edits.npy")
        windows.mix_in(edits, config.edits_every, first=config.edits_from * per_step)
    body = torch.compile(lambda ids: model.model(input_ids=ids, use_cache=False).last_hidden_state)
    columns = ("{task.description}", BarColumn(), TextColumn("{task.fields[loss]}"))
    saved_at = time.monotonic()
    with (
        Progress(*columns, TimeRemainingColumn()) as progress,
        (out / "log.jsonl").open("a") as log,
    ):
        bar = progress.add_task(config.name, total=config.num_steps, completed=step, loss="")
        while step < config.num_steps:
            wait_while_paused(out.parent / "PAUSE")
            loss = train_step(config, model, optimisers, windows, body, step, device)
            step += 1
            progress.update(bar, advance=1, loss=f"step {step} loss {loss:.3f}")
            line = {"step": step, "loss": round(loss, 4), "t_s": round(time.time(), 1)}
            log.write(json.dumps(line) + "\n")
            log.flush()
            if time.monotonic() - saved_at > checkpoint_every_s:
                save_checkpoint(out, model, optimisers, step)
                saved_at = time.monotonic()
    save_checkpoint(out, model, optimisers, step)
    export(model, data, final)
    return final


def train_step(config, model, optimisers, windows, body, step, device) -> float:  # noqa: ANN001
    """One optimiser step over accumulate x micro_batch windows; returns the mean loss in nats."""
    total = 0.0
    for micro in range(config.accumulate):
        first = (step * config.accumulate + micro) * config.micro_batch
        ids = windows.batch(first, config.micro_batch).to(device)
        with torch.autocast(device, torch.bfloat16):
            hidden = body(ids[:, :-1])
        hidden = hidden.flatten(0, 1).to(torch.bfloat16)
        head = model.lm_head.weight
        loss = ChunkedCrossEntropy.apply(hidden, head, ids[:, 1:].flatten())
        (loss / config.accumulate).backward()
        total += float(loss.detach()) / config.accumulate
    if not math.isfinite(total):
        raise SystemExit(f"loss is {total} at step {step}; the last checkpoint is intact")
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimisers.step(schedule(config, step))
    return total


def export(model: LlamaForCausalLM, data: Path, final: Path) -> None:
    """Write bf16 safetensors, configuration and tokenizer in Hugging Face format."""
    model = model.to("cpu", torch.bfloat16)
    model.config._attn_implementation = "sdpa"
    model.save_pretrained(final)
    PreTrainedTokenizerFast.from_pretrained(data / "tokenizer").save_pretrained(final)
