"""Heads on the target's hidden states, and the ways in which they read something else."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from safetensors.torch import load_file
from tests.lab.device import DRAFT_PACE, Device
from tests.lab.laboratory import TARGET, Lab
from torch import Tensor

from forerun.control.base import Plan
from forerun.drafters.base import Drafter, DraftRequest, StepOutcome
from forerun.drafters.eagle3.drafter import Eagle3Drafter
from forerun.drafters.eagle3.head import Eagle3Head
from forerun.drafters.eagle3.load import model_of, read_for
from forerun.drafters.medusa import (
    MedusaConfig,
    MedusaDrafter,
    MedusaHeads,
    read_medusa,
    write_medusa,
)
from forerun.measure.judge import read_text
from forerun.models.base import LanguageModel, WrappedModel
from forerun.models.checkpoint import ModelFiles
from forerun.models.kv_store import KVStore, Prefix
from forerun.sampling.proposal import Proposal

__all__ = [
    "HEAD",
    "HEAD_TARGET",
    "EarlierRows",
    "StaleAfterHit",
    "eagle3_drafter",
    "medusa_drafter",
    "trained_medusa",
    "without_biases",
]

HEAD = "zoo:eagle3-for-40m"
HEAD_TARGET = "zoo:code-40m"


def eagle3_drafter(lab: Lab, layers: tuple[int, ...] | None = None, **flags: bool) -> Eagle3Drafter:
    """Return a drafter with the shipped head.

    Args:
        lab: with its target.
        layers: that it reads; None for those it was trained on.
        flags: of its configuration, in place of its own.
    """
    target = lab.model(HEAD_TARGET)
    trained = read_for(ModelFiles.find(HEAD).folder, target)
    head = Eagle3Head(replace(trained.config, **flags), trained.target_ids)
    head.load_state_dict(trained.state_dict())
    head = head.to(torch.bfloat16).requires_grad_(False)
    drafter = Eagle3Drafter(
        model_of(head, target), layers or head.config.feature_layers, target.vocab_size
    )
    drafter.model = lab.draft_model(drafter.model)
    return drafter


class EarlierRows(Drafter):
    """Gives a drafter the hidden states of the row before in place of every row's own.

    Args:
        drafter: receives them.
    """

    def __init__(self, drafter: Eagle3Drafter) -> None:
        self.drafter = drafter
        self.method, self.required_features = drafter.method, drafter.required_features
        self._last: dict[str, Tensor] = {}

    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | None]:
        """As the drafter does."""
        return self.drafter.propose(requests, plans)

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Move all rows by one."""
        self.drafter.observe([replace(o, features=self._moved(o)) for o in outcomes])

    def _moved(self, outcome: StepOutcome) -> Tensor | None:
        rows = outcome.features
        if rows is None or not len(rows):
            return rows
        before = self._last.get(outcome.request_id, rows[:1])
        self._last[outcome.request_id] = rows[-1:]
        return torch.cat([before, rows[:-1]])

    def forget(self, request_id: str) -> None:
        """Drop the state of a request."""
        self._last.pop(request_id, None)
        self.drafter.forget(request_id)


class StaleAfterHit(WrappedModel):
    """A target whose hidden states are, after a prefix hit, those of other rows of its slot.

    Args:
        model: the target.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self.store: Any = StaleStore(model.store)


class StaleStore:
    """A KV store that reverses the order of the hidden states of tokens found in it.

    Args:
        store: does the work.
    """

    def __init__(self, store: KVStore) -> None:
        self._inner = store
        self._num_found: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def begin(self, wanted: Prefix) -> int:
        """Begin a sequence, and note how many of its tokens were there."""
        slot = self._inner.begin(wanted)
        self._num_found[slot] = self._inner.length(slot)
        return slot

    def features(self, slot: int, start: int, stop: int) -> Float[Tensor, "rows layers width"]:
        """Return features, those of found tokens in reverse order."""
        rows = self._inner.features(slot, start, stop)
        found = min(stop, self._num_found.get(slot, 0)) - start
        if found > 0:
            rows[:found] = rows[:found].flip(0)
        return rows


# ------------------------------------------------------------------------------------------ Medusa

NUM_MEDUSA_HEADS = 2
NUM_ROWS = 128


class MedusaOnDevice(MedusaDrafter):
    """Medusa heads that take a draft's pass on the device.

    Args:
        heads: in the target's dtype.
        target: theirs.
        device: on which they run.
    """

    def __init__(self, heads: MedusaHeads, target: LanguageModel, device: Device) -> None:
        super().__init__(heads, target)
        self._device = device

    def _log_probs(self, hidden: Tensor, depth: int) -> Tensor:
        begun = time.thread_time()
        log_probs = super()._log_probs(hidden, depth)
        self._device.pass_s["draft"] += DRAFT_PACE.pass_s
        self._device.hidden_s += time.thread_time() - begun
        return log_probs


def medusa_drafter(lab: Lab, heads: MedusaHeads) -> MedusaDrafter:
    """Return a drafter with Medusa heads on the shipped small target."""
    target = lab.model(TARGET)
    return MedusaOnDevice(heads.to(torch.bfloat16), target, lab.device)


def without_biases(heads: MedusaHeads) -> MedusaHeads:
    """Return a copy whose biases are zero, as in a loader that has no place for them."""
    changed = copy.deepcopy(heads)
    for name, parameter in changed.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
    return changed


def trained_medusa(lab: Lab) -> tuple[MedusaHeads, Path]:
    """Return Medusa heads in fp32 and their folder, trained on the laboratory's prompts once."""
    folder = lab.folder / "medusa"
    if not folder.exists():
        write_medusa(train_medusa(lab), folder, target=TARGET)
    heads = read_medusa(folder, vocab_size=lab.model(TARGET).vocab_size)
    return heads.requires_grad_(False), folder


def train_medusa(lab: Lab) -> MedusaHeads:
    """Train heads for the tokens after the next one by cross-entropy on the target's states."""
    target = lab.model(TARGET)
    prompts = lab.prompts()[: 4 * lab.num_training_steps]
    texts = [lab.tokenizer.encode(text)[:200] for text in prompts]
    states, wanted = [], []
    for ids in texts:
        features = read_text(target, ids, (target.num_layers,))[1]
        usable = len(ids) - 1 - NUM_MEDUSA_HEADS
        states.append(target.final_norm(features[:usable, 0]).float())
        after = torch.tensor(ids)
        wanted.append(torch.stack([after[k : k + usable] for k in range(2, 2 + NUM_MEDUSA_HEADS)]))
    hidden, tokens = torch.cat(states), torch.cat(wanted, dim=1)
    weights = load_file(ModelFiles.find(TARGET).folder / "model.safetensors")
    output = weights["model.embed_tokens.weight"].float()
    noise = torch.Generator().manual_seed(0)
    heads = MedusaHeads(
        MedusaConfig(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            num_heads=NUM_MEDUSA_HEADS,
        )
    )
    for parameter in heads.parameters():
        parameter.data.normal_(std=0.02, generator=noise)
    optimizer = torch.optim.Adam(heads.parameters(), lr=3e-3)
    for _ in range(lab.num_training_steps):
        rows = torch.empty(NUM_ROWS, dtype=torch.int64).random_(len(hidden), generator=noise)
        logits = heads(hidden[rows], lambda state: state @ output.T)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, rows].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return heads.eval().requires_grad_(False)
