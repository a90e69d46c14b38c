"""Draft trees against chains on the 292M pair, with synthetic acceptance by rank.

    python benchmarks/pairs.py --sizes 292m --out build/pairs
    python benchmarks/trees/run.py --pair build/pairs/292m --out benchmarks/trees/results/speed.json

ACCEPTANCE IS SYNTHETIC. The passes of target and draft are real and are timed, but the draft's
logits are replaced: the token that the target goes on with has rank 1, 2, 3 or 4 with given
probabilities, drawn by position, or is not among the four. So the acceptance of a draft of any
quality can be set, and what is measured is what chains and trees make of it.

Every block is one prompt continued by every arm, in rotating order, greedily; all arms must emit
the tokens of plain decoding. The best chain and the best tree are chosen on every other block and
compared on the rest, with a 95% interval (t) of the mean log ratio over these blocks. `auto` has no
profile: it learns costs and acceptance from its steps, and goes on learning from block to block;
`auto with a profile` begins with measured costs. Both have the default settings (K = 4, 16 nodes).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from forerun.control.base import Tree
from forerun.control.goodput import GoodputController
from forerun.control.named import FixedController
from forerun.drafters.draft_model import DraftModel
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.results import RequestOutput
from forerun.measure.bench.compare import BenchArm, Block, Prompt, run_blocks
from forerun.measure.profile import load_profile
from forerun.models.base import ModelOutput, RowBatch
from forerun.models.catalog import held_out_prompts
from forerun.provenance import collect
from forerun.sampling.config import SamplingParams
from forerun.theory.splitmix import finalise

LATER = (0.4, 0.3, 0.25)
"""P(rank 2, 3, 4 is the target's token | no rank before it is)."""
MOST_NODES = 16
CHAINS = (1, 2, 3, 4, 6)
TREES = ("7,2,4", "8,3,4", "11,3,4", "16,4,4")
DEFAULTS = EngineConfig()
AUTO = "auto"
PROFILED = "auto with a profile"
PROMPT_TOKENS = 32


@dataclass(kw_only=True)
class Synthetic:
    """A draft model whose passes are real and whose logits are not.

    Attributes:
        model: what is run.
        shares: P(the target's token has rank 1, 2, ...).
        truth: prompt and continuation of the only sequence.
    """

    model: Any
    shares: tuple[float, ...] = ()
    truth: Sequence[int] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def use(self, alpha: float) -> None:
        """Set the acceptance of rank 1."""
        left, shares = 1.0 - alpha, [alpha]
        for later in LATER:
            shares.append(left * later)
            left *= 1.0 - later
        self.shares = tuple(shares)

    def ranked(self, position: int) -> list[int]:
        """The tokens of ranks 1 to 4 for a position of the text."""
        true = self.truth[position] if position < len(self.truth) else 1
        drawn = finalise(position * 2654435761 + true) / 2**64
        rank = sum(drawn >= bound for bound in accumulate(self.shares))
        tokens = [(true + 1 + n) % self.model.vocab_size for n in range(len(self.shares))]
        if rank < len(tokens):
            tokens[rank] = true
        return tokens

    def forward(self, batch: RowBatch) -> ModelOutput:
        """One real pass, and the logits that rank tokens as wanted."""
        output = self.model.forward(batch)
        logits = output.logits
        if not len(logits):
            return output
        left = (1.0 - sum(self.shares)) / self.model.vocab_size
        made = torch.full_like(logits, math.log(left), dtype=torch.float32)
        values = torch.tensor([math.log(share) for share in self.shares])
        for row, position in zip(made, batch.positions[batch.logit_rows].tolist(), strict=True):
            row[self.ranked(position + 1)] = values
        return ModelOutput(logits=made, features=output.features)

    def greedy_chain(self, batch: RowBatch, num_tokens: int, vocab_size: int) -> Tensor:
        """The real chain is computed; the tokens of rank 1 are returned."""
        found = self.model.greedy_chain(batch, num_tokens, vocab_size)
        start = int(batch.positions[-1]) + 1
        tokens = [self.ranked(start + n)[0] for n in range(num_tokens)]
        return torch.tensor(tokens, dtype=found.dtype)[None]


@dataclass(kw_only=True)
class Told:
    """An engine whose draft knows what the target will say, and whose text is checked."""

    engine: Engine
    draft: Synthetic
    texts: Mapping[str, list[int]]
    num_prompt: Mapping[str, int]

    def generate(self, prompts: Sequence[str], params: Any) -> list[RequestOutput]:
        (prompt,) = prompts
        self.draft.truth = self.texts[prompt]
        num = self.num_prompt[prompt]
        outputs = self.engine.generate([list(self.texts[prompt][:num])], params)
        if list(outputs[0].token_ids) != list(self.texts[prompt][num:]):
            raise SystemExit("an arm emitted another text than plain decoding")
        return outputs


def engines(pair: Path, threads: int) -> tuple[Engine, Synthetic]:
    """The target without a draft, and the draft."""
    config = EngineConfig(
        num_speculative_tokens=MOST_NODES,
        max_batch=1,
        max_context=512,
        sharing="none",
        num_threads=threads,
        controller="fixed",
    )
    target = Engine.load(pair / "target", config=config)
    drafter = target.with_draft(pair / "draft", MOST_NODES).drafter
    assert isinstance(drafter, DraftModel)
    return target, Synthetic(model=drafter.model)


def arms_of(target: Engine, draft: Synthetic, profile: Path | None) -> dict[str, Engine]:
    """Plain decoding, chains, trees and `auto`."""
    found = {"plain": target}
    model: Any = draft
    for k in CHAINS:
        drafter = DraftModel(model, target.target.vocab_size)
        found[f"K={k}"] = target.with_draft(drafter, controller=FixedController(k))
    for text in TREES:
        drafter = DraftModel(model, target.target.vocab_size)
        found[f"tree={text}"] = target.with_draft(
            drafter, controller=FixedController(Tree.parse(text))
        )
    named_costs = {AUTO: {}}
    if profile is not None:
        named_costs[PROFILED] = {DraftModel.method: load_profile(profile).costs}
    for name, costs in named_costs.items():
        drafter = DraftModel(model, target.target.vocab_size)
        controller = GoodputController(
            {drafter.method: costs.get(drafter.method)},
            DEFAULTS.num_speculative_tokens,
            tree_methods=(drafter.method,),
            max_tree_nodes=DEFAULTS.max_tree_nodes,
        )
        found[name] = target.with_draft(drafter, controller=controller)
    return found


def speed(block: Block, name: str) -> float:
    """Decoded tokens per second of an arm in a block, prefill left out."""
    (found,) = [m for m in block if m.arm.name == name]
    return found.num_decoded / found.decode_s


def best(blocks: Sequence[Block], prefix: str) -> str:
    """The arm of a kind that is fastest over blocks."""
    names = [m.arm.name for m in blocks[0] if m.arm.name.startswith(prefix)]
    return max(names, key=lambda name: fmean(math.log(speed(b, name)) for b in blocks))


def ratio(blocks: Sequence[Block], name: str, other: str) -> list[float]:
    """Geometric mean of the ratio of two arms over blocks, with its 95% interval."""
    logs = [math.log(speed(b, name) / speed(b, other)) for b in blocks]
    half = stdev(logs) / math.sqrt(len(logs)) * float(stats.t.ppf(0.975, len(logs) - 1))
    return [math.exp(fmean(logs) + at * half) for at in (0, -1, 1)]


def summary(blocks: Sequence[Block]) -> dict[str, Any]:
    """Figures of one acceptance."""
    chosen_on, scored_on = blocks[0::2], blocks[1::2]
    chain, tree = best(chosen_on, "K="), best(chosen_on, "tree=")
    fixed = max((chain, tree, "plain"), key=lambda n: fmean(speed(b, n) for b in chosen_on))
    rows = {
        m.arm.name: {
            "tokens_per_s": math.exp(fmean(math.log(speed(b, m.arm.name)) for b in blocks)),
            "over_plain": ratio(blocks, m.arm.name, "plain"),
            "tau": sum(x.num_decoded for b in blocks for x in b if x.arm == m.arm)
            / sum(x.num_decode_steps for b in blocks for x in b if x.arm == m.arm),
        }
        for m in blocks[0]
    }
    return {
        "best_chain": chain,
        "best_tree": tree,
        "tree_over_chain": ratio(scored_on, tree, chain),
        "best_fixed": fixed,
        "auto_over_best": {
            m.arm.name: ratio(scored_on, m.arm.name, fixed)
            for m in blocks[0]
            if m.arm.name.startswith(AUTO)
        },
        "num_blocks": len(blocks),
        "arms": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", type=Path, default=Path("build/pairs/292m"))
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.5, 0.6, 0.7, 0.8])
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--profile", type=Path, help="of the pair, for a second arm of auto")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    target, draft = engines(options.pair, options.threads)
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens, ignore_eos=True)
    prompts = [prompt.text for prompt in held_out_prompts()][: options.blocks]
    ids = {text: target.tokenizer.encode(text)[:PROMPT_TOKENS] for text in prompts}
    outputs = [target.generate([ids[text]], params)[0] for text in prompts]
    texts = {t: [*ids[t], *o.token_ids] for t, o in zip(prompts, outputs, strict=True)}
    num_prompt = {text: len(tokens) for text, tokens in ids.items()}
    content: dict[str, Any] = {"label": "synthetic acceptance by rank", "later": LATER}
    for alpha in options.alphas:
        draft.use(alpha)
        arms = [
            BenchArm(
                name=name,
                method="plain" if name == "plain" else "draft_model",
                num_speculative_tokens=0 if name == "plain" else MOST_NODES,
                engine=Told(engine=engine, draft=draft, texts=texts, num_prompt=num_prompt),
            )
            for name, engine in arms_of(target, draft, options.profile).items()
        ]
        for arm in arms:
            if not arm.name.startswith(AUTO):  # a controller would learn from this text
                arm.engine.generate([prompts[0]], params)
        batches = [(Prompt(text=text, params=params),) for text in prompts]
        found = summary(list(run_blocks(arms, batches, time.perf_counter)))
        content[f"{alpha:g}"] = found
        tree = found["tree_over_chain"]
        print(
            f"rank 1 {alpha:g}: {found['best_tree']} over {found['best_chain']} {tree[0]:.3f} "
            f"({tree[1]:.3f} to {tree[2]:.3f})",
            *(
                f"; {name} over {found['best_fixed']} {at:.3f} ({low:.3f} to {high:.3f})"
                for name, (at, low, high) in found["auto_over_best"].items()
            ),
            flush=True,
        )
    content["provenance"] = collect({}, options.threads).to_dict()
    options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
