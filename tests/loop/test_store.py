"""Collected texts: consent is the server's; here quotas, duplicates, deletion and full disks."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from forerun.align.samples import read_prompts
from forerun.engine.results import Completion, RequestOutput
from forerun.errors import InvalidRequest
from forerun.loop import store as loop_store
from forerun.loop.store import TrafficStore
from forerun.sampling.config import TokenSource
from forerun.theory.acceptance import AcceptanceCounts


def answer(prompt, text, finish_reason="stop"):
    ids = tuple(text.encode())
    completion = Completion(
        index=0,
        text=text,
        token_ids=ids,
        finish_reason=finish_reason,
        stop_reason=None,
        sources=(TokenSource.PLAIN,) * len(ids),
        logprobs=None,
        acceptance=AcceptanceCounts(),
        ttft_s=0.0,
        prefill_s=0.0,
        total_s=0.0,
        num_cached_tokens=0,
        num_preemptions=0,
    )
    return RequestOutput(
        request_id="r", prompt_token_ids=tuple(prompt.encode()), completions=(completion,)
    )


def open_store(folder, **changes):
    return TrafficStore(folder, lambda ids: bytes(ids).decode(), **changes)


def stored(folder):
    paths = sorted(folder.glob("*.parquet"))
    rows = [row for path in paths for row in loop_store._read_rows(path)]
    return [row for row in rows if row["token_ids"]]


def test_texts_are_stored_once_and_found_again(tmp_path):
    with open_store(tmp_path) as store:
        store.put("a", "one", answer("2+2=", "4"))
        store.put("b", "one", answer("2+2=", "4"))
        store.put("c", "two", answer("2+2=", "4"))  # tenants know nothing of each other
        store.put("d", "one", answer("2+2=", "", "abort"))
    rows = stored(tmp_path)
    assert [(r["request_id"], r["tenant"]) for r in rows] == [("a", "one"), ("c", "two")]
    assert (rows[0]["prompt"], rows[0]["response"]) == ("2+2=", "4")
    with open_store(tmp_path) as store:
        store.put("e", "one", answer("2+2=", "4"))
        store.put("f", "one", answer("3+3=", "6"))
    assert [r["request_id"] for r in stored(tmp_path)] == ["a", "c", "f"]
    assert store.count() == 3


def test_a_text_is_deleted_by_every_request_that_had_it(tmp_path):
    with open_store(tmp_path) as store:
        for name in ("a", "b", "b"):
            store.put(name, "one", answer("2+2=", "4"))
        store.put("a", "two", answer("2+2=", "4"))
    with open_store(tmp_path) as store:
        assert store.delete("c", "one") == 0
        assert store.delete("b", "one") == 1
        assert store.delete("a", "one") == 0
    assert [row["tenant"] for row in stored(tmp_path)] == ["two"]
    assert store.count() == 1


def test_many_long_texts_are_read_again(tmp_path):
    ids = {"prompt_ids": [7] * 200_000, "token_ids": [1], "prompt": "", "response": ""}
    about = {"digest": "d", "tenant": "one", "at_s": 0.0}
    rows = [{**ids, **about, "request_id": str(number)} for number in range(12)]
    loop_store._write_rows(rows, tmp_path / "0.parquet")
    assert len(stored(tmp_path)) == 12


def test_the_oldest_of_a_tenant_give_way_at_its_quota(tmp_path, caplog):
    with caplog.at_level(logging.WARNING), open_store(tmp_path, quota_bytes=1000) as store:
        store.put("other", "two", answer("q", "kept"))
        for number in range(40):
            store.put(f"r{number}", "one", answer(f"question {number:03}", "x" * 20))
            store._flush()
    rows = stored(tmp_path)
    own = [row for row in rows if row["tenant"] == "one"]
    assert 0 < sum(map(loop_store._count_bytes, own)) <= 1000
    assert own[-1]["request_id"] == "r39"
    assert "r0" not in {row["request_id"] for row in own}
    assert rows[0]["request_id"] == "other"
    assert caplog.text.count("reach the quota of 1000 bytes") == 1


def test_texts_are_deleted_by_the_request_and_its_tenant(tmp_path):
    with open_store(tmp_path) as store:
        for name in ("a", "b"):
            store.put(name, "one", answer(f"prompt of {name}", "text"))
        assert store.delete("a", "two") == 0
        assert store.delete("a", "one") == 1
        assert [row["request_id"] for row in stored(tmp_path)] == ["b"]
        assert store.delete("b", "one") == 1
        assert not [*tmp_path.glob("*.parquet")]
        store.put("c", "one", answer("prompt of a", "text"))  # may be stored again
    assert [row["request_id"] for row in stored(tmp_path)] == ["c"]


def test_a_full_disk_is_reported_once_and_collecting_goes_on(tmp_path, caplog, monkeypatch):
    write = loop_store._write_rows

    def refuse(rows, path):
        raise OSError(28, "No space left on device", str(path))

    with caplog.at_level(logging.WARNING), open_store(tmp_path) as store:
        monkeypatch.setattr(loop_store, "_write_rows", refuse)
        for number in range(3):
            store.put(f"r{number}", "one", answer("q", f"{number}"))
            store._flush()
        assert store.num_left_out == 3
        monkeypatch.setattr(loop_store, "_write_rows", write)
        store.put("later", "one", answer("q", "later"))
    assert [row["request_id"] for row in stored(tmp_path)] == ["later"]
    assert caplog.text.count("No space left on device") == 1


def test_a_queue_that_is_full_loses_texts_and_nothing_else(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(loop_store, "MAX_QUEUED", 2)
    monkeypatch.setattr(loop_store, "FLUSH_S", 60.0)
    with caplog.at_level(logging.WARNING), open_store(tmp_path) as store:
        for number in range(5):
            store.put(f"r{number}", "one", answer("q", f"{number}"))
        assert store.num_left_out == 3
    assert len(stored(tmp_path)) == 2
    assert caplog.text.count("some are left out") == 1


def test_a_second_writer_of_a_folder_is_refused(tmp_path):
    with open_store(tmp_path), pytest.raises(InvalidRequest, match="uses"):
        open_store(tmp_path).__enter__()


def test_the_newest_texts_are_prompts_with_answers_for_align(tmp_path, drafts):
    from forerun.models.checkpoint import ModelFiles

    tokenizer = ModelFiles.open(drafts.target).tokenizer
    with TrafficStore(tmp_path, tokenizer.decode) as store:
        for number in range(5):
            found = answer("q", "a")
            prompt = tuple(tokenizer.encode(f"question {number}"))
            ids = tuple(tokenizer.encode(f" answer {number}"))
            (own,) = found.completions
            own = replace(own, token_ids=ids, text=f" answer {number}")
            store.put(
                f"r{number}", "one", replace(found, prompt_token_ids=prompt, completions=(own,))
            )
        assert store.export(tmp_path / "new" / "texts.parquet", 3) == 3
    records = read_prompts(tmp_path / "new", tokenizer, 512)
    assert len(records) == 3
    (sample,) = records[-1].brought
    assert tokenizer.decode(sample.token_ids) == "question 4 answer 4"
