"""Twenty poisoned or broken drafts: none is promoted, and requests go on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.loop.conftest import traffic
from tests.system.conftest import byte_tokenizer, save_model

from forerun.loop.journal import Record

pytestmark = pytest.mark.usefixtures("unchecked")

WEIGHTS = "model.safetensors"


def change_weights(folder: Path, change) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({n: change(n, t) for n, t in tensors.items()}, folder / WEIGHTS, {"format": "pt"})


def change_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def scramble(seed: int, scale: float):
    """Add noise, as training on noise does."""
    generator = torch.Generator().manual_seed(seed)
    return lambda folder: change_weights(
        folder, lambda _, t: t + scale * torch.empty_like(t).normal_(generator=generator)
    )


def fill(value: float):
    return lambda folder: change_weights(folder, lambda _, t: torch.full_like(t, value))


def cut(share: float):
    def change(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(content[: int(share * len(content))])

    return change


def save_random(seed: int):
    return lambda folder: save_model(folder, num_layers=4, seed=seed)


def take_tokenizer(folder: Path) -> None:
    """The vocabulary of other bytes: the same number of tokens in another order."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    names = sorted(vocabulary, key=vocabulary.get)
    tokenizer["model"]["vocab"] = {n: i for i, n in enumerate([names[0], *names[:0:-1]])}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def slow_down(loop, clock) -> None:
    """Let every draft of the candidates take two milliseconds more."""
    load = loop._load

    def load_slow(*given):
        drafter = load(*given)
        propose = drafter.propose

        def propose_slowly(*asked):
            clock.now_s += 0.002
            return propose(*asked)

        drafter.propose = propose_slowly
        return drafter

    loop._load = load_slow


BROKEN = {
    "missing": shutil.rmtree,
    "empty": lambda folder: [path.unlink() for path in folder.iterdir()],
    "without weights": lambda folder: (folder / WEIGHTS).unlink(),
    "without configuration": lambda folder: (folder / "config.json").unlink(),
    "half written": cut(0.5),
    "nearly written": cut(0.999),
    "of another kind": lambda folder: change_config(
        folder, architectures=["VitsModel"], model_type="vits"
    ),
    "of another width": lambda folder: change_config(folder, hidden_size=48),
    "no JSON": lambda folder: (folder / "config.json").write_text("{"),
    "NaN": fill(float("nan")),
    "infinite": fill(float("inf")),
    "zero": fill(0.0),
    "other tokenizer": take_tokenizer,
    "longer vocabulary": lambda folder: byte_tokenizer(("zz",)).save_pretrained(folder),
    "random weights": save_random(5),
    "more random weights": save_random(6),
    "little noise": scramble(1, 0.05),
    "noise": scramble(2, 0.3),
    "much noise": scramble(3, 3.0),
    "right but slow": lambda folder: None,
}


@pytest.fixture
def serving(drafts, open_loop):
    """A loop over a good draft, with requests that go on."""
    loop, running = open_loop(drafts.near, drafts.near, "native")
    with traffic(running) as asking:
        yield loop, asking


def test_no_broken_draft_is_promoted(serving, drafts, tmp_path, trial_clock):
    loop, asking = serving
    assert len(BROKEN) == 20
    for number, (name, spoil) in enumerate(BROKEN.items(), start=1):
        folder = tmp_path / f"draft-{number}"
        shutil.copytree(drafts.near, folder)
        spoil(folder)
        if name == "right but slow":
            slow_down(loop, trial_clock)
        given = {"stage": "train", "is_good": True, "version": 0, "why": name}
        loop.journal.append(Record(round=number, draft=str(folder), **given))
        record = loop.take_stage()
        assert (record.stage, record.is_good, record.version) == ("shadow", False, 0), name
        assert record.why.startswith("it is"), record.why
        print(name, "|", record.why)
    assert loop.running.engine.observers == []
    assert asking.num_answered > 0
