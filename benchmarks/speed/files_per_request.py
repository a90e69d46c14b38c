"""Counts the source files that run in one request, in a load or in an alignment.

A reader who follows a request through the code has to open as many. Loading is not counted, and
neither is a first request, which builds what later requests use again. A controller runs further
files, and drafts only where that pays, so K is fixed unless one is named:

    python benchmarks/speed/files_per_request.py --target zoo:code-11m --draft zoo:code-2m
    python benchmarks/speed/files_per_request.py --controller auto

An alignment is counted from its first line to its report, with what it loads:

    python benchmarks/speed/files_per_request.py --align draft_model
    python benchmarks/speed/files_per_request.py --align eagle3

A load of a GGUF file or a folder is counted from the call of `Engine.load` to its return, after
the modules were imported and the kernels compiled:

    python benchmarks/speed/files_per_request.py --load path/to/model.gguf
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import forerun

PACKAGE = Path(forerun.__file__).parent
PROMPT = "def add(first, second):\n"
NUM_PROMPTS = 24


@contextmanager
def files_run() -> Iterator[set[str]]:
    """Collects the files whose functions are entered on this thread inside the block."""
    files: set[str] = set()

    def enter(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            files.add(frame.f_code.co_filename)

    sys.setprofile(enter)
    try:
        yield files
    finally:
        sys.setprofile(None)


def run_align(method: str, target: str, draft: str, folder: Path) -> set[str]:
    """Run a small alignment, judged and exported, and return the files that were entered."""
    from forerun.align.config import AlignConfig, DataConfig, EvaluationConfig, TrainingConfig
    from forerun.align.run import align

    prompts = folder / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"def add_{i}(x):\n"}) for i in range(NUM_PROMPTS)]
    prompts.write_text("\n".join(lines) + "\n", "utf-8")
    config = AlignConfig(
        target=target,
        method=method,
        draft=draft if method == "draft_model" else None,
        out=folder / "aligned",
        sampling=forerun.SamplingParams(max_tokens=8),
        data=DataConfig(prompts=prompts, held_out_share=0.3),
        training=TrainingConfig(num_steps=2, window=32, tokens_per_step=64),
        evaluation=EvaluationConfig(num_evaluations=1, max_prompts=2),
    )
    with files_run() as files:
        align(config)
    return files


def run_request(arguments: argparse.Namespace) -> set[str]:
    """Generate one text twice, and return the files that the second request entered."""
    params = forerun.SamplingParams(max_tokens=32, temperature=arguments.temperature)
    config = forerun.EngineConfig(controller=arguments.controller)
    engine = forerun.Engine.load(arguments.target, draft=arguments.draft, config=config)
    engine.generate([PROMPT], params)
    with files_run() as files:
        engine.generate([PROMPT], params)
    return files


def run_load(source: Path) -> set[str]:
    """Load a model twice, the second time from a copy, and return the files that this entered."""
    load = forerun.Engine.load
    load(source)
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder, source.name)
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, copied)
        with files_run() as files:
            load(copied)
    return files


def list_names(files: set[str]) -> list[str]:
    """Return the names of the files of the package below it."""
    inside = (Path(name) for name in files if name.startswith(str(PACKAGE)))
    return sorted(path.relative_to(PACKAGE).as_posix() for path in inside)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="zoo:code-11m")
    parser.add_argument("--draft", default="zoo:code-2m")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--controller", choices=("fixed", "auto"), default="fixed")
    parser.add_argument("--align", choices=("draft_model", "eagle3", "medusa"))
    parser.add_argument("--load", type=Path, metavar="MODEL")
    arguments = parser.parse_args()
    if arguments.load is not None:
        files = run_load(arguments.load)
    elif arguments.align is None:
        files = run_request(arguments)
    else:
        with tempfile.TemporaryDirectory() as folder:
            files = run_align(arguments.align, arguments.target, arguments.draft, Path(folder))
    names = list_names(files)
    print(*names, sep="\n")
    print(f"{len(names)} files, {sum(name.startswith('align/') for name in names)} of align")


if __name__ == "__main__":
    main()
