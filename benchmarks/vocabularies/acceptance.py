"""Compares acceptance with transformers' universal assisted decoding on the same pairs and prompts.

    python benchmarks/vocabularies/acceptance.py DRAFTS --out results.json

DRAFTS is the folder that drafts.py wrote. Both sides decode greedily in fp32, draft chains of the
same number of the target's tokens (transformers: of the draft's tokens, as it counts them) and
count emitted tokens per pass of the target. Texts are compared with our own plain decoding. forerun
is measured in either way, and the way that it chooses itself is named.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import forerun
from forerun.drafters.base import Drafter
from forerun.drafters.foreign import SharedTokenDraft, SharedTokenModel, TextDraft
from forerun.drafters.vocabulary_map import map_vocabularies
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.observing import EmittedRecords
from forerun.models.catalog import held_out_prompts, zoo_path
from forerun.models.checkpoint import ModelFiles
from forerun.models.load import load_model
from forerun.sampling.config import SamplingParams
from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.record import StepRecord


def ours(engine: Engine, prompts: Sequence[str], params: SamplingParams) -> dict[str, Any]:
    """Texts and emitted tokens per pass that drafted or could have."""
    records: list[StepRecord] = []
    engine.observers[:] = [EmittedRecords(records.append)]
    begun = time.monotonic()
    outputs = [engine.generate([prompt], params)[0] for prompt in prompts]
    counts = AcceptanceCounts.from_records(records)
    num_tokens = sum(record.num_emitted for record in records)
    return {
        "texts": [list(output.token_ids) for output in outputs],
        "num_tokens": num_tokens,
        "num_passes": len(records),
        "tokens_per_pass": num_tokens / len(records),
        "draft_acceptance_rate": counts.draft_acceptance_rate,
        "per_position": list(counts.acceptance_rate_per_position),
        "seconds": time.monotonic() - begun,
    }


def theirs(
    target: Path, draft: Path, prompts: Sequence[str], max_tokens: int, k: int
) -> dict[str, Any]:
    """The same of universal assisted decoding, in which every pass of the target is counted."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    assistant = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32).eval()
    tokenizer, own = AutoTokenizer.from_pretrained(target), AutoTokenizer.from_pretrained(draft)
    assistant.generation_config.num_assistant_tokens = k
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    passes: list[int] = []
    model.register_forward_hook(lambda *_: passes.append(1))
    texts, begun = [], time.monotonic()
    for prompt in prompts:
        ids = torch.tensor([ModelFiles.find(target).tokenizer.encode(prompt)])
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            assistant_model=assistant,
            tokenizer=tokenizer,
            assistant_tokenizer=own,
            pad_token_id=0,
        )
        texts.append(found[0, ids.shape[1] :].tolist())
    num_tokens = sum(map(len, texts))
    return {
        "texts": texts,
        "num_tokens": num_tokens,
        "num_passes": len(passes),
        "tokens_per_pass": num_tokens / len(passes),
        "seconds": time.monotonic() - begun,
    }


def drafters(target: Engine, folder: Path) -> tuple[str, dict[str, Drafter], str]:
    """The way forerun chooses, the drafter of either way, and what is said of the pair."""
    vocabulary = map_vocabularies(target.tokenizer, ModelFiles.find(folder).tokenizer)
    model = load_model(folder, dtype="float32", max_batch=8, max_staged_rows=80)
    size = target.target.vocab_size
    shared = SharedTokenDraft(SharedTokenModel(model, vocabulary, size), vocabulary, size)
    return vocabulary.way, {"tli": shared, "slem": TextDraft(model, vocabulary)}, vocabulary.reason


def ending(text: str, num_characters: int) -> str:
    """The last lines of a text, for drafts with a short context."""
    return text if len(text) <= num_characters else text[-num_characters:].partition("\n")[2]


def compare(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    prompts = [ending(p.text, args.prompt_characters) for p in held_out_prompts()][: args.prompts]
    params = SamplingParams(temperature=0, max_tokens=args.tokens)
    config = EngineConfig(num_speculative_tokens=args.k, controller="fixed", sharing="none")
    plain = Engine.load(args.target, dtype="float32", config=config)
    expected = ours(plain, prompts, params)["texts"]
    chosen, ways, reason = drafters(plain, folder)
    found: dict[str, Any] = {"reason": reason, "chosen": chosen}
    for way, drafter in ways.items():
        found[way] = ours(plain.with_draft(drafter), prompts, params)
        found[f"{way}, T=1"] = ours(
            plain.with_draft(drafter), prompts, SamplingParams(seed=5, max_tokens=args.tokens)
        )
    source = zoo_path(args.target) if args.target.startswith("zoo:") else Path(args.target)
    for k in args.their_k:
        found[f"transformers, K={k}"] = theirs(source, folder, prompts, args.tokens, k)
    for name, arm in found.items():
        if isinstance(arm, dict):
            texts = arm.pop("texts")
            if "T=1" not in name:
                same = [one == other for one, other in zip(texts, expected, strict=True)]
                arm["texts_equal_to_plain"] = f"{sum(same)} of {len(same)}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("drafts", type=Path)
    parser.add_argument("--target", default="zoo:code-11m")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--prompt-characters", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("-k", type=int, default=4, help="of the target's tokens")
    parser.add_argument("--their-k", type=int, nargs="+", default=[4], help="of the draft's tokens")
    parser.add_argument("--kinds", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    content = json.loads(args.out.read_text()) if args.out.exists() else {}
    content["about"] = {
        "commit": commit.stdout.strip(),
        "command": " ".join(sys.argv),
        "versions": {m.__name__: m.__version__ for m in (forerun, torch, transformers)},
    }
    for kind in args.kinds or sorted(p.name for p in args.drafts.iterdir() if p.is_dir()):
        found = content[f"{kind}, K={args.k}"] = compare(args.drafts / kind, args)
        print(kind, found["reason"])
        for name, arm in found.items():
            if isinstance(arm, dict):
                print(f"  {name}: {arm['tokens_per_pass']:.3f} tokens per pass", flush=True)
        args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
