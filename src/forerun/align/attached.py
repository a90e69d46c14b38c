"""Attached heads under training: created, unrolled over texts, their loss, loaded and saved.

A fresh EAGLE-3 head begins close to the target: the state entering the last of its layers passes
through, and the output matrix has the target's rows. Heads share the target's embedding. Of Medusa
heads (Medusa-1), head k of row t learns token t + k + 2.

Pass i of row t learns token t + i + 2. The target's distribution at a place is learned by up to one
row per pass. It is computed once: rows are sorted by that place, so that a chunk of them needs the
distributions of few places.

An EAGLE-3 head is unrolled over a whole text in parallel. Pass 0 reads the target's features. Pass
i reads the output of pass i - 1 in the same row together with the embedding of token t + i + 1, at
position t + i: what the head does when it drafts the (i + 1)-th token from row t. A row therefore
sees the rows of pass 0 up to its own, and of the later passes its own column alone, for in drafting
all other rows have been computed again from the target's features. Source: EAGLE-3 (arXiv
2503.01840), training-time test.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from forerun.align.config import AlignConfig, AttachedConfig
from forerun.align.draft import DraftHead, LearnedRows, chunked_loss
from forerun.align.objectives import DenseDistribution, Objective
from forerun.align.samples import PackedBatch, Sample, drafted_tokens, seen
from forerun.align.target import TargetModel, adopt_target, check_layers, embedding_table
from forerun.align.target_cache import one_per_row
from forerun.align.teachers import FeatureTeacherRows, TeacherRows
from forerun.align.workspace import write_hashes
from forerun.atomic_write import atomic_folder, remove_unfinished
from forerun.drafters.eagle3.head import Eagle3Config, Eagle3Head, default_feature_layers
from forerun.drafters.eagle3.load import read_eagle3_head, write_eagle3_head, write_golden
from forerun.drafters.medusa import MedusaConfig, MedusaHeads, write_medusa
from forerun.errors import IncompatibleDraft
from forerun.models.architecture import Architecture
from forerun.models.checkpoint import ModelFiles
from forerun.models.huggingface import MODULE_NAMES, read_weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassStates:
    """Hidden states of all training passes of a head, for the rows that have a loss.

    Attributes:
        head: what turns them into logits.
        target_ids: target token of every logit, ascending; None: one per token of the target.
    """

    hidden: Sequence[Float[Tensor, "_ hidden"]]
    head: DraftHead
    target_ids: Int64[Tensor, " draft_vocab"] | None = None


def learned_passes(batch: PackedBatch, num_passes: int) -> Bool[Tensor, "passes rows width"]:
    """Return which rows have a loss in each pass: in pass i, row t learns token t + i + 2."""
    found = torch.zeros((num_passes, *batch.ids.shape), dtype=torch.bool, device=batch.ids.device)
    for number in range(num_passes):
        shift = number + 1
        if shift >= batch.ids.shape[1]:
            break
        same = batch.samples[:, shift:] == batch.samples[:, :-shift]
        found[number, :, :-shift] = batch.predicts[:, shift:] & same
    return found


class PassLoss(nn.Module):
    """The loss of all passes of a head, summed over its rows and averaged over its passes.

    Args:
        model: the head: from a batch, the target's features and the rows that learn in each pass
            to `PassStates`.
        temperature: the one the head is deployed at; decides which acceptance is reported.
        decay: weight of a pass over that of the one before it.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        *,
        temperature: float,
        num_passes: int,
        decay: float,
    ) -> None:
        super().__init__()
        self.model = model
        self.objective = objective
        self.temperature = temperature
        self.num_passes = num_passes
        weights = [decay**number for number in range(num_passes)]
        self.weights = [weight / sum(weights) for weight in weights]
        # Accelerate reads here which layers to shard one by one: a head is sharded as a whole.
        self._no_split_modules: list[str] = []

    def forward(
        self, batch: PackedBatch, rows: FeatureTeacherRows
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        learning = learned_passes(batch, self.num_passes)
        found: PassStates = self.model(batch, rows, learning)
        learned = self._sorted(batch, rows, learning, found)
        total = chunked_loss(
            learned, found.head, self.objective, temperature=self.temperature, with_acceptance=True
        )
        assert total.acceptance is not None  # it was asked for
        return total.loss.clone(), total.acceptance / self.num_passes

    def _sorted(
        self,
        batch: PackedBatch,
        rows: FeatureTeacherRows,
        learning: Bool[Tensor, "passes rows width"],
        found: PassStates,
    ) -> LearnedRows:
        ranks = batch.predicts.flatten().cumsum(0) - 1  # of the learned places
        places = [
            learning[number].flatten().nonzero()[:, 0] + number + 1
            for number in range(self.num_passes)
        ]
        counts = torch.tensor([len(of_pass) for of_pass in places], device=ranks.device)
        exact = torch.promote_types(found.hidden[0].dtype, torch.float32)  # that of the losses
        weights = torch.tensor(self.weights, dtype=exact, device=ranks.device)
        weights = weights.repeat_interleave(counts)
        all_places = torch.cat(places)
        order = torch.argsort(all_places, stable=True)
        all_places = all_places[order]
        ids = batch.ids.flatten()
        return LearnedRows(
            hidden=torch.cat(list(found.hidden))[order],
            labels=self._labels(ids, all_places, found.target_ids),
            teacher=TeacherRowsByPosition(
                # What cannot be drafted is left out, so that a row counts as much as its
                # distribution can be learned, and alpha is the one that the vocabulary allows.
                rows if found.target_ids is None else rows.over(found.target_ids),
                ranks[all_places],
            ),
            weights=weights[order],
        )

    def _labels(
        self, ids: Tensor, places: Tensor, target_ids: Tensor | None
    ) -> Int64[Tensor, " rows"]:
        """Return the draft-vocabulary id of the token after each position."""
        following = ids[(places + 1).clamp(max=len(ids) - 1)]
        if target_ids is None:
            return following
        return torch.searchsorted(target_ids, following).clamp(max=len(target_ids) - 1)


@dataclass(eq=False)
class TeacherRowsByPosition:
    """Target distributions for training rows, several of which may learn the same position.

    Args:
        ranks: index of every training row's position among the learned positions, ascending.
    """

    rows: TeacherRows
    ranks: Int64[Tensor, " rows"]

    def __len__(self) -> int:
        return len(self.ranks)

    def distribution(self, rows: slice) -> DenseDistribution:
        ranks = self.ranks[rows]
        first, end = (int(ranks[0]), int(ranks[-1]) + 1) if len(ranks) else (0, 0)
        found = self.rows.distribution(slice(first, end))
        assert isinstance(found, DenseDistribution)  # heads are trained at a temperature above 0
        return DenseDistribution(target_probs=found.target_probs[ranks - first])


class UnrolledEagle3(nn.Module):
    """An EAGLE-3 head under training with the target's frozen embedding; see `PassLoss`."""

    def __init__(self, head: Eagle3Head, embedding: Float[Tensor, "vocab hidden"]) -> None:
        super().__init__()
        self.head = head
        self.register_buffer("embedding", embedding.detach().float(), persistent=False)

    def forward(
        self,
        batch: PackedBatch,
        rows: FeatureTeacherRows,
        learning: Bool[Tensor, "passes rows width"],
    ) -> PassStates:
        """Run all passes; see `PassLoss`."""
        outputs = unroll(self.head, self.embed, batch, rows.features, learning)
        hidden = [self.head.norm(output) for output in outputs]
        return PassStates(
            hidden=hidden,
            head=DraftHead(weight=self.head.lm_head.weight),
            target_ids=self.head.target_ids,
        )

    def embed(self, tokens: Int64[Tensor, "*rows"]) -> Float[Tensor, "*rows hidden"]:
        if self.head.embed_tokens is not None:
            embedded: Tensor = self.head.embed_tokens(tokens)
            return embedded
        assert isinstance(self.embedding, Tensor)
        return self.embedding[tokens]


def unroll(
    head: Eagle3Head,
    embed: Callable[[Tensor], Tensor],
    batch: PackedBatch,
    features: Float[Tensor, "rows width layers hidden"],
    learning: Bool[Tensor, "passes rows width"],
) -> list[Float[Tensor, "_ hidden"]]:
    """Return the head's hidden states in every pass, at the rows that have a loss in it."""
    num_passes = len(learning)
    active = learning.any(0)  # the rows that draft; the others are only seen
    attention = ColumnAttention(mask=seen(batch), active=active)
    following = F.pad(batch.ids, (0, num_passes))
    width = batch.ids.shape[1]
    dtype = head.fc.weight.dtype
    state = head.fuse(features.to(dtype)).to(dtype)  # the residual stream stays whole in autocast
    tokens = following[:, 1 : width + 1]
    output = head(embed(tokens), state, batch.positions, attention)[active]
    outputs = [output[learning[0][active]]]
    positions = batch.positions[active]
    for number in range(1, num_passes):
        tokens = following[:, number + 1 : width + number + 1][active]
        output = head(embed(tokens), head.fed_back(output), positions + number, attention)
        outputs.append(output[learning[number][active]])
    return outputs


@dataclass(slots=True, kw_only=True, eq=False)
class ColumnAttention:
    """Attention of the unroll: causal over pass 0, then over the same row in later passes.

    The first call is pass 0, with all rows of a batch [rows, width, heads, dim]; later calls have
    the drafting rows alone [active, heads, dim].
    """

    mask: Bool[Tensor, "rows 1 width width"]
    active: Bool[Tensor, "rows width"]
    context: tuple[Tensor, Tensor] | None = None
    columns: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the attention output; see `forerun.drafters.eagle3.head.Attend`."""
        if self.context is None:
            self.context = keys, values
            return F.scaled_dot_product_attention(
                queries.transpose(1, 2),
                self._spread(keys, queries).transpose(1, 2),
                self._spread(values, queries).transpose(1, 2),
                attn_mask=self.mask,
            ).transpose(1, 2)
        self.columns.append((self._spread(keys, queries), self._spread(values, queries)))
        return self._later(queries)

    def _later(
        self, queries: Float[Tensor, "active heads dim"]
    ) -> Float[Tensor, "active heads dim"]:
        assert self.context is not None
        keys, values = (self._spread(part, queries).transpose(1, 2) for part in self.context)
        scale = queries.shape[-1] ** -0.5
        # The rows of a batch side by side again, for one product with the keys of their texts.
        laid_out = queries.new_zeros(*self.active.shape, *queries.shape[1:])
        laid_out[self.active] = queries
        scores = laid_out.transpose(1, 2) @ keys.transpose(2, 3) * scale
        scores = scores.masked_fill(~self.mask, -torch.inf).transpose(1, 2)[self.active]
        own = [(queries * key).sum(-1, keepdim=True) * scale for key, _ in self.columns]
        exact = torch.promote_types(queries.dtype, torch.float32)
        shares = torch.cat([scores, *own], dim=-1).softmax(-1, dtype=exact).to(queries.dtype)
        width = keys.shape[2]
        placed = queries.new_zeros(*self.active.shape, queries.shape[1], width)
        placed[self.active] = shares[..., :width]
        attended = (placed.transpose(1, 2) @ values).transpose(1, 2)[self.active]
        for number, (_, value) in enumerate(self.columns):
            attended = attended + shares[..., width + number, None] * value
        return attended

    @staticmethod
    def _spread(part: Tensor, queries: Tensor) -> Tensor:
        return part.repeat_interleave(queries.shape[-2] // part.shape[-2], dim=-2)


LEAST_GOLDEN, MOST_GOLDEN = 8, 12
"""Least and most tokens of the text whose outputs are stored as golden rows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TargetParts:
    """Parts of the target that heads use unchanged, in fp32."""

    settings: Mapping[str, Any]
    architecture: Architecture
    model: TargetModel
    embedding: Float[Tensor, "vocab hidden"]
    norm: Float[Tensor, " hidden"]
    head: Float[Tensor, "vocab hidden"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GoldenText:
    """A text with the target's features, by which a head is checked whenever it is loaded."""

    tokens: Int64[Tensor, " tokens"]
    features: Float[Tensor, "tokens layers hidden"]


@dataclass(eq=False)
class AttachedDraft:
    """A head under training; see `TrainedDraft`."""

    config: AlignConfig
    model: UnrolledEagle3 | MedusaOverTarget
    feature_layers: tuple[int, ...]
    golden: GoldenText | None = None

    def loss(self, objective: Objective, config: AlignConfig) -> PassLoss:
        return PassLoss(
            self.model,
            objective,
            temperature=config.draft_temperature,
            num_passes=config.attached.num_passes,
            decay=config.attached.pass_decay,
        )

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write the head in bf16, in the form that engines with native support for it read."""
        head = copy.deepcopy(self.model.head).cpu().float()
        parameters = dict(head.named_parameters())
        with torch.no_grad():
            for name, tensor in weights.items():
                parameters[name.removeprefix("model.head.")].copy_(tensor)
        remove_unfinished(folder)  # only one process writes it, under the lock of the folder
        with atomic_folder(folder) as scratch:
            self._write(head.to(torch.bfloat16), scratch)
            write_hashes(scratch)

    def _write(self, head: Eagle3Head | MedusaHeads, folder: Path) -> None:
        if isinstance(head, MedusaHeads):
            write_medusa(head, folder, target=self.config.target)
            return
        write_eagle3_head(
            head,
            folder,
            target=self.config.target,
            target_architecture=ModelFiles.open(self.config.target).architecture,
            num_speculative_tokens=self.config.evaluation.num_speculative_tokens,
        )
        if self.golden is not None and isinstance(self.model, UnrolledEagle3):
            write_golden(
                head,
                folder,
                tokens=self.golden.tokens,
                features=self.golden.features,
                embed=self.model.embed,
            )


def load_attached(config: AlignConfig, samples: Sequence[Sample]) -> AttachedDraft:
    """Load the head to start from, or create one for the training texts."""
    target = read_parts(config.target)
    if config.method == "medusa":
        return AttachedDraft(config, _fresh_medusa(config.attached, target), ())
    if config.draft is None:
        seed = config.training.training_seed
        head = _fresh_eagle3(config.attached, target, samples, seed)
    else:
        head = _known_eagle3(ModelFiles.find(config.draft).folder, target.architecture)
        if config.attached.draft_vocab_size not in (None, head.config.draft_vocab_size):
            head = _with_vocabulary(head, target, samples, config.attached.draft_vocab_size)
    layers = head.config.feature_layers
    model = UnrolledEagle3(head, target.embedding)
    return AttachedDraft(config, model, layers, _golden_text(target.model, layers, samples))


def _golden_text(
    target: TargetModel, layers: tuple[int, ...], samples: Sequence[Sample]
) -> GoldenText | None:
    """Return the beginning of the first text that is long enough, with the target's features."""
    ids = next((s.token_ids for s in samples if len(s.token_ids) >= LEAST_GOLDEN), ())
    if not ids:
        return None
    text = Sample(prompt_hash="", token_ids=ids[:MOST_GOLDEN], spans=((1, len(ids[:MOST_GOLDEN])),))
    states = target.states(one_per_row([text], [0]), layers)[0, :, :-1]
    return GoldenText(tokens=torch.tensor(text.token_ids), features=states)


def read_parts(source: str | Path) -> TargetParts:
    files = ModelFiles.open(source)
    settings, architecture = files.settings, files.sizes
    network = read_weights(files, torch.float32)
    model = adopt_target(network)
    norm = network.get_submodule(MODULE_NAMES[architecture.name].norm)
    return TargetParts(
        settings=settings,
        architecture=architecture,
        model=model,
        embedding=embedding_table(network).clone(),
        norm=norm.weight.detach().clone(),
        head=network.get_output_embeddings().weight.detach().clone(),
    )


def choose_feature_layers(attached: AttachedConfig, num_layers: int) -> tuple[int, ...]:
    layers = attached.feature_layers or default_feature_layers(num_layers)
    check_layers(layers, num_layers)
    return layers


def _fresh_eagle3(
    attached: AttachedConfig, target: TargetParts, samples: Sequence[Sample], seed: int
) -> Eagle3Head:
    sizes, settings = target.architecture, target.settings
    tokens = drafted_tokens(samples, sizes.vocab_size, attached.draft_vocab_size)
    num_heads = attached.num_heads or sizes.num_heads
    own_heads = attached.num_heads is not None
    config = Eagle3Config(
        target_hidden_size=sizes.hidden_size,
        target_vocab_size=sizes.vocab_size,
        feature_layers=choose_feature_layers(attached, sizes.num_layers),
        draft_vocab_size=len(tokens),
        hidden_size=sizes.hidden_size,
        intermediate_size=attached.intermediate_size
        or settings.get("intermediate_size", 4 * sizes.hidden_size),
        num_heads=num_heads,
        num_kv_heads=attached.num_kv_heads or (num_heads if own_heads else sizes.num_kv_heads),
        head_dim=sizes.head_dim,
        norm_eps=settings.get("rms_norm_eps", 1e-6),
        max_positions=sizes.max_positions,
        rope=read_rope(settings),
        norm_before_residual=attached.norm_before_residual,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)  # noqa: TID251 (torch fills weights from it)
        head = Eagle3Head(config, tokens)
        head.fc.weight.normal_(0, 0.1 * config.target_hidden_size**-0.5)
        head.fc.weight[:, -config.target_hidden_size :] += torch.eye(config.hidden_size)
        head.lm_head.weight.copy_(target.head[tokens])
        head.norm.weight.copy_(target.norm)
    return head


def read_rope(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the target's rotary settings; defaults if none of them cover whole heads."""
    rope = settings.get("rope_parameters") or {}
    if "rope_theta" in rope and "partial_rotary_factor" not in rope:
        return dict(rope)
    return {"rope_type": "default", "rope_theta": 10000.0}


def check_start(config: AlignConfig) -> None:
    """Refuse a head to start from that is of another target."""
    if config.method == "eagle3" and config.draft is not None:
        sizes = ModelFiles.open(config.target).sizes
        _known_eagle3(ModelFiles.find(config.draft).folder, sizes)


def _known_eagle3(folder: Path, sizes: Architecture) -> Eagle3Head:
    head = read_eagle3_head(folder, num_target_layers=sizes.num_layers)
    found = head.config.target_hidden_size, head.config.target_vocab_size
    if found != (sizes.hidden_size, sizes.vocab_size):
        raise IncompatibleDraft(
            f"the head in {folder} is for a target {found[0]} wide with {found[1]} tokens; this "
            f"one is {sizes.hidden_size} wide with {sizes.vocab_size}: leave --draft out to make "
            "a head for it"
        )
    check_layers(head.config.feature_layers, sizes.num_layers)
    return head


def _with_vocabulary(
    head: Eagle3Head, target: TargetParts, samples: Sequence[Sample], size: int | None
) -> Eagle3Head:
    """Return a head with a new vocabulary; tokens new to it begin with the target's row."""
    tokens = drafted_tokens(samples, target.architecture.vocab_size, size)
    found = Eagle3Head(replace(head.config, draft_vocab_size=len(tokens)), tokens)
    rows = target.head.clone()
    rows[head.target_ids] = head.lm_head.weight.detach()
    maps = {"d2t": found.d2t, "t2d": found.t2d}
    found.load_state_dict({**head.state_dict(), "lm_head.weight": rows[tokens], **maps})
    return found


def _fresh_medusa(attached: AttachedConfig, target: TargetParts) -> MedusaOverTarget:
    config = MedusaConfig(
        hidden_size=target.architecture.hidden_size,
        vocab_size=target.architecture.vocab_size,
        num_heads=attached.num_passes,
        num_blocks=attached.num_blocks,
    )
    return MedusaOverTarget(MedusaHeads(config), target.head)


class MedusaOverTarget(nn.Module):
    """Medusa heads under training, with the target's frozen output matrix."""

    def __init__(self, head: MedusaHeads, output: Float[Tensor, "vocab hidden"]) -> None:
        super().__init__()
        self.head = head
        self.register_buffer("output", output.detach().float(), persistent=False)

    def forward(
        self,
        batch: PackedBatch,
        rows: FeatureTeacherRows,
        learning: Bool[Tensor, "passes rows width"],
    ) -> PassStates:
        """Run all Medusa heads over the rows that have a loss; see `PassLoss`."""
        active = learning.any(0)
        hidden = rows.last.to(torch.float32)[active]
        states = self.head.states(hidden)
        assert isinstance(self.output, Tensor)
        return PassStates(
            hidden=[
                state[of_pass[active]] for state, of_pass in zip(states, learning, strict=True)
            ],
            head=DraftHead(weight=self.output),
        )
