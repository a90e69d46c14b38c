"""Teachers over a cache: the same distributions without the target, and nothing is lost."""

from __future__ import annotations

import errno
import logging
from dataclasses import replace

import pytest
import torch
from tests import tiny
from tests.unit.align.teachers.conftest import all_rows, caching, expected_logits, texts

from forerun.align import teachers as filling
from forerun.align.objectives import dense_probs
from forerun.align.teachers import Teacher, make_teacher
from forerun.errors import CacheTooLarge, InvalidCache, InvalidRequest, NumericalError
from forerun.sampling.config import SamplingParams

KINDS = ("hidden", "choices")
"""What is cached: for the second the target is greedy."""


@pytest.fixture
def make(on_disk):
    """Makes a teacher; what of its source differs is named."""

    def of(kind: str = "hidden", **changes) -> Teacher:
        if kind == "choices":
            changes["sampling"] = SamplingParams(temperature=0)
        settings = changes.pop("config", caching("auto" if kind == "choices" else kind))
        return make_teacher(settings, on_disk.with_(**changes), 100)

    return of


@pytest.fixture
def no_target(monkeypatch):
    """From now on the target cannot be loaded."""

    def forbid():
        def refuse(*arguments, **named):
            raise AssertionError("the target was loaded")

        monkeypatch.setattr("forerun.align.target.load_target", refuse)

    return forbid


def probs_of_rows(teacher: Teacher, batch) -> torch.Tensor:
    rows = teacher.rows(batch)
    return dense_probs(rows.distribution(slice(None)), tiny.VOCAB_SIZE)


def kept_files(source):
    return sorted(source.cache_dir.glob("*/rows-*.safetensors"))


def test_hidden_states_give_the_distributions_of_the_target(make, on_disk):
    packing, batch = all_rows(texts())
    teacher = make()
    teacher.prepare(packing.samples)
    expected = expected_logits(on_disk.network, packing, batch).softmax(-1)
    torch.testing.assert_close(probs_of_rows(teacher, batch), expected, atol=2e-5, rtol=2e-4)


def test_one_cache_serves_every_temperature(make, on_disk, no_target):
    packing, batch = all_rows(texts())
    make().prepare(packing.samples)
    no_target()
    teacher = make(sampling=SamplingParams(temperature=0.6))
    teacher.prepare(packing.samples)
    expected = (expected_logits(on_disk.network, packing, batch) / 0.6).softmax(-1)
    torch.testing.assert_close(probs_of_rows(teacher, batch), expected, atol=2e-5, rtol=2e-4)


def test_choices_are_the_most_likely_tokens_of_the_target(make, on_disk):
    packing, batch = all_rows(texts())
    teacher = make("choices")
    teacher.prepare(packing.samples)
    best = expected_logits(on_disk.network, packing, batch).argmax(-1)
    expected = torch.nn.functional.one_hot(best, tiny.VOCAB_SIZE).float()
    assert torch.equal(probs_of_rows(teacher, batch), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_cached_needs_no_target(kind, make, no_target):
    packing, batch = all_rows(texts())
    first = make(kind)
    first.prepare(packing.samples)
    no_target()
    again = make(kind)
    again.prepare(packing.samples)
    assert torch.equal(probs_of_rows(again, batch), probs_of_rows(first, batch))


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_lacking_is_worked_out(kind, make, on_disk):
    packing, _ = all_rows(texts())
    told = []
    make(kind).prepare(packing.samples[:5])
    make(kind, on_progress=lambda done, total: told.append((done, total))).prepare(packing.samples)
    lacking = sum(sample.num_learned for sample in packing.samples[5:])
    assert told[-1] == (lacking, lacking)
    assert len(kept_files(on_disk.source)) == len(packing.samples)


def test_the_same_text_learned_elsewhere_is_another_entry(make):
    (sample, *_), _ = texts(), None
    other = replace(sample, spans=((2, 4),))
    packing, batch = all_rows([sample, other])
    teacher = make()
    teacher.prepare(packing.samples)
    assert len(probs_of_rows(teacher, batch)) == sample.num_learned + 2


def test_a_changed_target_never_finds_what_another_left(make, on_disk):
    packing, batch = all_rows(texts())
    make().prepare(packing.samples)
    tiny.network(num_layers=1, seed=9).save_pretrained(on_disk.source.target.folder)
    teacher = make()
    teacher.prepare(packing.samples)
    assert len({path.parent for path in kept_files(on_disk.source)}) == 2
    other = tiny.network(num_layers=1, seed=9)
    expected = expected_logits(other, packing, batch).softmax(-1)
    torch.testing.assert_close(probs_of_rows(teacher, batch), expected, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("part", ["tokenizer.json", "chat_template.jinja"])
def test_a_changed_tokenizer_or_template_never_finds_what_another_left(part, make, on_disk):
    packing, _ = all_rows(texts())
    make().prepare(packing.samples)
    with (on_disk.source.target.folder / part).open("a") as file:
        file.write(" ")
    make().prepare(packing.samples)
    assert len({path.parent for path in kept_files(on_disk.source)}) == 2


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_last_bit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut_in_half, flip_last_bit, empty])
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_named_and_made_again(kind, damage, make, on_disk, caplog):
    packing, batch = all_rows(texts())
    first = make(kind)
    first.prepare(packing.samples)
    expected = probs_of_rows(first, batch)
    damaged = kept_files(on_disk.source)[3]
    damage(damaged)
    again = make(kind)
    again.prepare(packing.samples)
    assert f"{damaged} is damaged; its content is computed again" in caplog.text
    torch.testing.assert_close(probs_of_rows(again, batch), expected, atol=1e-6, rtol=1e-5)


def test_a_file_that_vanishes_in_training_is_named(make, on_disk):
    packing, batch = all_rows(texts())
    teacher = make()
    teacher.prepare(packing.samples)
    kept_files(on_disk.source)[0].unlink()
    with pytest.raises(InvalidCache, match="cannot be read any more"):
        teacher.rows(batch)


def test_a_disk_that_fills_up_loses_nothing_that_was_finished(make, on_disk, monkeypatch):
    packing, batch = all_rows(texts())
    monkeypatch.setattr(filling, "MAX_TOKENS", 1)
    kept = []

    def keep(folder, *arguments, **named):
        if len(kept) == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        kept.append(original(folder, *arguments, **named))
        return kept[-1]

    original = filling.write_cached
    monkeypatch.setattr(filling, "write_cached", keep)
    with pytest.raises(CacheTooLarge, match="is full; finished files are kept"):
        make().prepare(packing.samples)
    assert kept_files(on_disk.source) == sorted(kept)
    monkeypatch.setattr(filling, "write_cached", original)
    told = []
    teacher = make(on_progress=lambda done, total: told.append(done))
    teacher.prepare(packing.samples)
    assert len(told) == len(packing.samples) - 4
    expected = expected_logits(on_disk.network, packing, batch).softmax(-1)
    torch.testing.assert_close(probs_of_rows(teacher, batch), expected, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_an_interruption_keeps_what_was_worked_out(kind, make, monkeypatch):
    packing, _ = all_rows(texts())
    monkeypatch.setattr(filling, "MAX_TOKENS", 1)
    told = []

    def report(done, total):
        told.append(done)
        if len(told) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(kind, on_progress=report).prepare(packing.samples)
    told = [0, 0, 0]
    make(kind, on_progress=report).prepare(packing.samples)
    assert len(told) == 3 + len(packing.samples) - 3


def test_what_a_killed_process_was_writing_is_not_read(make, on_disk):
    """A file has its name only once it is whole."""
    packing, batch = all_rows(texts())
    first = make()
    first.prepare(packing.samples[:4])
    finished = kept_files(on_disk.source)[0]
    (finished.parent / "tmpk1lled").write_bytes(finished.read_bytes()[:100])
    again = make()
    again.prepare(packing.samples)
    expected = expected_logits(on_disk.network, packing, batch).softmax(-1)
    torch.testing.assert_close(probs_of_rows(again, batch), expected, atol=2e-5, rtol=2e-4)
    assert len(kept_files(on_disk.source)) == len(packing.samples)


def test_bytes_are_said_before_anything_is_written(make, on_disk, caplog):
    caplog.set_level(logging.INFO, "forerun.preparation")
    packing, _ = all_rows(texts())
    num_rows = packing.num_learned
    needed = num_rows * 32 * 4
    config = caching(max_cache_bytes=needed - 1)
    with pytest.raises(CacheTooLarge, match=f"last hidden states of {num_rows} positions take"):
        make(config=config).prepare(packing.samples)
    assert not on_disk.source.cache_dir.exists()
    assert f"caching last hidden states of {num_rows} positions in" in caplog.text
    assert "(128 B each)" in caplog.text
    make(config=replace(config, max_cache_bytes=needed)).prepare(packing.samples)
    files = [*on_disk.source.cache_dir.rglob("*.safetensors")]
    taken = sum(path.stat().st_size - 100 for path in files)  # headers are not counted
    assert 0.9 * needed < taken < 1.1 * needed


def test_states_that_are_not_finite_are_refused(on_disk, make):
    network = on_disk.network
    network.model.norm.weight.fill_(float("nan"))
    network.save_pretrained(on_disk.source.target.folder)
    with pytest.raises(NumericalError, match="not finite in a response to the prompt 0000"):
        make().prepare(texts(2))
    assert not kept_files(on_disk.source)


def test_text_of_another_tokenizer_is_refused(make):
    (sample,) = texts(1)
    with pytest.raises(InvalidRequest, match="tokenised for another model"):
        make().prepare([replace(sample, token_ids=(301, *sample.token_ids[1:]))])


def test_the_cache_knows_only_what_was_put(on_disk, make):
    teacher = make()
    teacher.prepare(texts(2))
    with pytest.raises(InvalidCache, match="was not prepared"):
        teacher.cache.read(texts(3)[-1])
