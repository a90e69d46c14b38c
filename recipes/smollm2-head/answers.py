"""Write prompts and answers of zoo:smollm2-135m for training a draft; more with every call.

    python recipes/smollm2-head/answers.py build/head/answers.jsonl --prompts mathematics.jsonl

Half of the prompts are turns that the model writes itself, as `forerun align --prompts self` does;
the others are drawn from the given files of `{"prompt": ...}` lines. Temperatures are mixed,
because a draft is used at more than one. A round takes minutes; end it with Ctrl-C at any time.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from pathlib import Path

from forerun import Engine, SamplingParams

TARGET = "zoo:smollm2-135m"
USER_TURN = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\n"
)
BEGINNINGS = (*[""] * 4, "Write a Python ", "How ", "Can you ", "A ", "If ", "I ")
TEMPERATURES = (0.3, 0.7, 1.0, 1.0)
LEAST_CHARACTERS = 12
LEAST_ASCII = 0.97  # share of the characters; other scripts are mostly noise of a small model


def simplify(text: str) -> str:
    """Return a text in lower case with its words alone, so that near copies are equal."""
    return re.sub(r"\W+", " ", text.lower()).strip()


def write_turns(engine: Engine, count: int, known: set[str], rng: random.Random) -> list[str]:
    """Let the model write user turns; return those that end, are readable and not known."""
    beginnings = [rng.choice(BEGINNINGS) for _ in range(count)]
    encode = engine.tokenizer.encode
    outputs = engine.generate(
        [encode(USER_TURN + beginning, add_special_tokens=False) for beginning in beginnings],
        SamplingParams(temperature=0.9, top_p=0.95, max_tokens=160),
    )
    turns = []
    for beginning, output in zip(beginnings, outputs, strict=True):
        text = (beginning + output.text).strip().split("\nassistant\n")[0].strip()
        is_readable = sum(map(str.isascii, text)) >= LEAST_ASCII * len(text)
        if output.completions[0].finish_reason != "stop" or not is_readable:
            continue
        if len(text) >= LEAST_CHARACTERS and simplify(text) not in known:
            known.add(simplify(text))
            turns.append(text)
    return turns


def answer(engine: Engine, prompts: list[str], rng: random.Random) -> list[str]:
    """Return the model's answer to every prompt."""
    tokenizer = engine.tokenizer
    chats = [tokenizer.render_chat([{"role": "user", "content": prompt}]) for prompt in prompts]
    outputs = engine.generate(
        [tokenizer.encode(chat, add_special_tokens=False) for chat in chats],
        [SamplingParams(temperature=rng.choice(TEMPERATURES), max_tokens=320) for _ in prompts],
    )
    return [output.text for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=Path, nargs="*", default=[])
    parser.add_argument("--round", type=int, default=320, help="prompts of one round")
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    given = [
        json.loads(line)["prompt"]
        for path in options.prompts
        for line in path.open("rb")
        if line.strip()
    ]
    lines = options.out.open("rb") if options.out.exists() else []
    known = {simplify(json.loads(line)["messages"][0]["content"]) for line in lines}
    engine = Engine.load(
        TARGET, draft=None, max_batch=64, max_context=1024, num_threads=options.threads
    )
    rng = random.Random(time.time_ns())  # every call writes other texts
    while True:
        prompts = write_turns(engine, options.round // 2, known, rng)
        prompts += rng.sample(given, min(len(given), options.round // 2))
        rng.shuffle(prompts)
        started_s = time.monotonic()
        answers = answer(engine, prompts, rng)
        with options.out.open("a", encoding="utf-8") as file:
            for prompt, text in zip(prompts, answers, strict=True):
                turns = [
                    {"role": "user", "content": prompt},
                    {"role": "assistant", "content": text},
                ]
                file.write(json.dumps({"messages": turns}) + "\n")
        print(f"{len(answers)} answers in {time.monotonic() - started_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
