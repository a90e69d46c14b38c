"""Teach the trained target not to repeat itself: unlikelihood on its own loops.

A small model falls into loops. It continues training windows, and wherever it repeats an n-gram of
its own text the probability of going on with the repetition is pushed down; cross-entropy on the
data keeps everything else in place.

The result is averaged with the weights it started from, which gives back most of the loss on data
that the tuning cost and keeps most of its effect.

Source: Welleck et al. 2020 (1908.04319), sequence-level unlikelihood; Wortsman et al. 2022
(2109.01903), averaging with the start.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor
from train import ChunkedCrossEntropy, Windows, export, wait_while_paused
from transformers import AutoModelForCausalLM, LlamaForCausalLM


@dataclass(frozen=True, kw_only=True)
class UnloopConfig:
    """How much text the target continues, and how it learns from it."""

    num_continuations: int = 1024
    prompt_tokens: int = 64
    new_tokens: int = 192
    temperatures: tuple[float, ...] = (0.4, 0.7)
    repeated_ngram: int = 12  # shorter repeats are normal in code
    num_steps: int = 120
    data_windows: int = 8
    own_windows: int = 16
    lr: float = 2e-4
    tuned_share: float = 0.4  # of the average with the weights before tuning
    seed: int = 3
    tokens: str = "python.npy"  # token file under the data folder


DEFAULTS = UnloopConfig()


def continuations(model: LlamaForCausalLM, config: UnloopConfig, data: Path) -> Tensor:
    """The model's own text after training windows, shape (num_continuations, prompt + new)."""
    windows = Windows(data / config.tokens, config.prompt_tokens, config.seed)
    torch.manual_seed(config.seed)
    size, done = 64, []
    for first in track(range(0, config.num_continuations, size), description="own text"):
        temperature = config.temperatures[first // size % len(config.temperatures)]
        prompts = windows.batch(first, size)[:, :-1].to(model.device)
        with torch.inference_mode(), torch.autocast(model.device.type, torch.bfloat16):
            texts = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                min_new_tokens=config.new_tokens,
                max_new_tokens=config.new_tokens,
                do_sample=True,
                temperature=temperature,
                top_k=0,
                pad_token_id=0,
            )
        done.append(texts.cpu())
    return torch.cat(done)


def repeats(texts: Tensor, size: int, first: int) -> Tensor:
    """True where a token from `first` on ends an n-gram of `size` that occurred before."""
    marked = np.zeros(texts.shape, dtype=bool)
    for row, ids in enumerate(texts.tolist()):
        seen: set[tuple[int, ...]] = set()
        for end in range(size, len(ids) + 1):
            ngram = tuple(ids[end - size : end])
            marked[row, end - 1] = end > first and ngram in seen
            seen.add(ngram)
    return torch.from_numpy(marked)


def unlikelihood(model: LlamaForCausalLM, texts: Tensor, marked: Tensor) -> Tensor:
    """Mean of -log(1 - p(token)) over the marked tokens."""
    texts, marked = texts.to(model.device), marked.to(model.device)
    with torch.autocast(model.device.type, torch.bfloat16):
        hidden = model.model(input_ids=texts[:, :-1], use_cache=False).last_hidden_state
        chosen = hidden[marked[:, 1:]]
        logits = model.lm_head(chosen).float()
    labels = texts[:, 1:][marked[:, 1:]]
    log_probs = F.log_softmax(logits, dim=-1).gather(1, labels[:, None])[:, 0]
    return -torch.log1p(-log_probs.exp().clamp(max=1 - 1e-4)).mean()


def unloop(folder: Path, data: Path, out: Path, config: UnloopConfig = DEFAULTS) -> Path:
    """Tune the model in `folder`; returns `out` with the tuned model in Hugging Face format."""
    if (out / "model.safetensors").exists():
        return out
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    own = out.with_name(f"{out.name}-texts.npy")
    if not own.exists():
        np.save(own, continuations(model, config, data).numpy())
    texts = torch.from_numpy(np.load(own))
    marked = repeats(texts, config.repeated_ngram, config.prompt_tokens)
    looping = marked.any(1).nonzero()[:, 0]
    print(f"{len(looping)} of {len(texts)} continuations repeat a {config.repeated_ngram}-gram")
    optimiser = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), fused=True)
    windows = Windows(data / config.tokens, 512, config.seed + 1)
    rng = np.random.default_rng(config.seed)
    for step in track(range(config.num_steps), description="unloop"):
        wait_while_paused(out.parent.parent / "PAUSE")
        ids = windows.batch(step * config.data_windows, config.data_windows).to(device)
        likely = data_loss(model, ids)
        likely.backward()
        rows = looping[rng.integers(len(looping), size=config.own_windows)]
        unlikely = unlikelihood(model, texts[rows], marked[rows])
        unlikely.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.param_groups[0]["lr"] = config.lr * schedule(config, step)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if step % 10 == 0:
            print(f"step {step}: loss {likely.item():.3f}, unlikelihood {unlikely.item():.3f}")
    tuned = model.state_dict()
    model.load_state_dict({n: torch.lerp(start[n], tuned[n], config.tuned_share) for n in start})
    export(model, data, out)
    return out


def data_loss(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Cross-entropy on training windows, as in the training proper."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    hidden = hidden.flatten(0, 1).to(torch.bfloat16)
    return ChunkedCrossEntropy.apply(hidden, model.lm_head.weight, ids[:, 1:].flatten())


def schedule(config: UnloopConfig, step: int) -> float:
    """Ten steps of warm-up, a constant third, linear decay."""
    return min((step + 1) / 10, (config.num_steps - step) / config.num_steps * 1.5, 1.0)
