"""`forerun generate` on a tiny random pair."""

from __future__ import annotations

import io
import json
import logging
import shutil
import sys
from dataclasses import replace
from functools import partial
from itertools import accumulate
from operator import mul

import pytest

from forerun.cli import generate
from forerun.cli.main import main
from forerun.cli.session import Session, load_engine
from forerun.control.goodput import GoodputController
from forerun.engine import auto_drafts
from forerun.engine.config import EngineConfig
from forerun.errors import InvalidRequest, NotEnoughMemory
from forerun.models.catalog import zoo_path
from forerun.models.runner.native import NativeModel
from forerun.sampling.config import SamplingParams
from forerun.theory.record import StepRecord
from forerun.trace.files import read_trace

GREEDY = ("--temperature", "0", "--max-tokens", "24")
SEEDED = ("--temperature", "1", "--seed", "5", "--max-tokens", "24")


@pytest.fixture
def run(tiny_pair, capsys):
    def call(*arguments: str, draft: str | None = None):
        pair = ["--target", str(tiny_pair.target), "--draft", draft or str(tiny_pair.draft)]
        code = main(["generate", *arguments, *pair, "--dtype", "float32"])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_text_goes_to_stdout_and_figures_to_stderr(run):
    code, out, err = run("def f", *GREEDY)
    assert code == 0
    assert out.endswith("\n")
    assert "24 tokens in" in err
    assert "a second, drafted by draft_model" in err
    assert "per position" not in err


def test_verbose_says_what_was_accepted(run):
    _, _, err = run("def f", *GREEDY, "--verbose")
    assert "tokens per step with a draft, accepted per position" in err


def test_quiet_prints_no_figures_and_no_notices(run):
    _, out, err = run("def f", *GREEDY, "--quiet")
    assert out
    assert "tokens" not in err and "forerun:" not in err


def test_a_warning_comes_after_the_text_that_is_streamed(run, monkeypatch):
    streamed = Session.run

    def with_warning(session, ids, params):
        for chunk in streamed(session, ids, params):
            logging.getLogger("forerun.engine").warning("careful")
            print("|", end="", file=sys.stderr)
            yield chunk

    monkeypatch.setattr(Session, "run", with_warning)
    code, _, err = run("def f", *GREEDY)
    assert code == 0
    assert err.rindex("|") < err.index("forerun: careful")


def test_quiet_hides_warnings_while_text_is_streamed(run, monkeypatch):
    streamed = Session.run

    def with_warning(session, ids, params):
        logging.getLogger("forerun.engine").warning("careful")
        logging.getLogger("forerun.engine").error("lost")
        return streamed(session, ids, params)

    monkeypatch.setattr(Session, "run", with_warning)
    _, _, err = run("def f", *GREEDY, "--quiet")
    assert "careful" not in err and "forerun: lost" in err


def test_flags_that_are_left_out_are_those_of_the_model(tiny_pair, tmp_path, monkeypatch):
    folder = shutil.copytree(tiny_pair.target, tmp_path / "stated")
    (folder / "generation_config.json").write_text('{"temperature": 0.3, "top_k": 7}')
    seen = []
    streamed = Session.run

    def noted(session, ids, params):
        seen.append((params.temperature, params.top_k, params.max_tokens))
        return streamed(session, ids, params)

    monkeypatch.setattr(Session, "run", noted)
    flags = ["--draft", "none", "--dtype", "float32", "--max-tokens", "2"]
    for more in ([], ["--temperature", "1.0", "--top-k", "0"]):
        assert main(["generate", "def f", "--target", str(folder), *flags, *more]) == 0
    assert main(["generate", "def f", "--target", str(tiny_pair.target), *flags]) == 0
    assert seen == [(0.3, 7, 2), (1.0, 0, 2), (0.0, 0, 2)]


def test_speculation_does_not_change_greedy_text(run):
    speculative = json.loads(run("def f", *GREEDY, "--controller", "fixed", "--json")[1])
    plain = json.loads(run("def f", *GREEDY, "--json", draft="none")[1])
    assert speculative["token_ids"] == plain["token_ids"]
    assert speculative["figures"]["num_accepted"] > 0
    assert plain["figures"]["num_drafted"] == 0
    assert plain["figures"]["acceptance_length"] is None


def test_a_seed_fixes_the_text_whatever_k(run):
    texts = {
        json.loads(run("def f", *SEEDED, "--json", "--k", k)[1])["text"] for k in ("1", "3", "6")
    }
    assert len(texts) == 1


def test_json_is_one_object_alone_on_stdout(run):
    _, out, _ = run("def f", *GREEDY, "--json", "--controller", "fixed")
    content = json.loads(out)
    assert content["finish_reason"] == "length"
    assert len(content["token_ids"]) == len(content["sources"]) == 24
    figures = content["figures"]
    assert figures["num_prompt_tokens"] == 5
    assert figures["num_tokens"] == 24
    assert len(figures["acceptance_rate_per_position"]) == EngineConfig().num_speculative_tokens
    assert figures["drafted_per_position"][0] == figures["num_steps"]


def test_auto_reports_what_was_chosen_and_changes_no_text(run):
    _, plain, _ = run("def f", *GREEDY)
    code, out, err = run("def f", *GREEDY, "--draft", "auto", "--verbose")
    assert code == 0
    assert out == plain
    assert "chosen: suffix" in err
    _, out, _ = run("def f", *GREEDY, "--draft", "auto", "--json", "--quiet")
    choices = json.loads(out)["figures"]["choices"]
    assert {choice["method"] for choice in choices} == {"plain", "draft_model", "suffix"}
    assert sum(choice["num_steps"] for choice in choices) > 0


@pytest.mark.parametrize(
    ("flags", "is_cut"),
    [
        (("--k", "7"), False),
        (("--k", "9"), True),
        ((), False),  # "auto" chooses
        (("--controller", "fixed", "--k", "8"), True),
    ],
)
def test_a_k_that_max_tokens_cuts_is_reported(run, flags, is_cut):
    code, _, err = run("def f", "--temperature", "0", "--max-tokens", "8", *flags)
    notice = "a step drafts at most 7 tokens, because --max-tokens is 8"
    assert code == 0 and (notice in err) == is_cut
    assert ("drafts at most" in err) == is_cut


def test_a_k_beyond_the_context_has_one_message(run):
    code, _, err = run("def f", "--k", "9999")
    assert code == 2 and "num_speculative_tokens is 9999" in err
    assert "drafts at most" not in err


@pytest.mark.parametrize("num_threads", ["0", "100000"])
def test_threads_that_the_machine_cannot_run_are_refused(run, num_threads):
    code, out, err = run("def f", *GREEDY, "--threads", num_threads)
    assert code == 2 and not out
    assert f"--threads is {num_threads}; it must be an integer at least 1" in err.splitlines()[-1]


def test_colour_marks_tokens_and_explains_itself(run):
    _, out, err = run("def f", *GREEDY, "--color", "--controller", "fixed")
    assert "\x1b[32m" in out
    assert "drafted and accepted" in err


def test_prompt_from_standard_input(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("def f"))
    from_stdin = json.loads(run("-", *GREEDY, "--json")[1])
    assert from_stdin["token_ids"] == json.loads(run("def f", *GREEDY, "--json")[1])["token_ids"]


def test_trace_has_header_steps_and_request(run, tmp_path):
    path = tmp_path / "trace.jsonl"
    run("def f", *GREEDY, "--json", "--trace", str(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = [line["record"] for line in lines]
    assert kinds == ["header", *["step"] * (len(lines) - 2), "request"]
    steps = lines[1:-1]
    assert sum(step["num_emitted"] for step in steps) == 24
    assert all(step["token_ids"] is None for step in steps)
    assert lines[0]["target_hash"] != lines[0]["draft_hash"]
    assert lines[-1]["parameters"]["temperature"] == 0
    assert lines[-1]["num_output_tokens"] == 24


@pytest.mark.parametrize("wrong", [{"draft": "/nonexistent"}, {"draft": "self:99"}])
def test_a_mistake_leaves_an_earlier_trace_alone(run, tmp_path, wrong):
    path = tmp_path / "trace.jsonl"
    path.write_text("earlier\n", encoding="utf-8")
    code, _, _ = run("def f", *GREEDY, "--trace", str(path), **wrong)
    assert code != 0
    assert path.read_text(encoding="utf-8") == "earlier\n"


def test_trace_with_tokens_holds_the_output(run, tmp_path):
    path = tmp_path / "trace.jsonl"
    _, out, _ = run("def f", *GREEDY, "--json", "--trace", str(path), "--trace-tokens")
    _, *steps, request = [json.loads(line) for line in path.read_text().splitlines()]
    assert [t for step in steps for t in step["token_ids"]] == json.loads(out)["token_ids"]
    assert len(request["prompt_token_ids"]) == request["num_prompt_tokens"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("",), "the prompt is empty"),
        (("x", "--raw", "--system", "be brief"), "leave out --raw"),
        (("x", "--raw", "--chat-template", "t.jinja"), "leave out --raw"),
        (("x", "--chat-template", "/dev/zero"), "a device or a socket"),
        (("x", "--trace-tokens"), "--trace-tokens needs --trace"),
        (("x", "--json", "--color"), "exclude each other"),
        (("x", "--system", "be brief"), "no chat template"),
        (("x", "--k", "-1"), "num_speculative_tokens is -1"),
        (("x", "--device", "abacus"), "abacus"),
        (("x" * 5000,), "5000 tokens"),
        (("x", "--trace", "/nonexistent/trace.jsonl"), "cannot be written"),
    ],
)
def test_what_cannot_be_honoured_is_one_line_and_exit_2(run, arguments, message):
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert message in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--temperature", "-1", "temperature is -1.0"),
        ("--top-p", "0", "top_p is 0.0"),
        ("--top-p", "1.5", "top_p is 1.5"),
        ("--max-tokens", "0", "max_tokens is 0"),
    ],
)
def test_bad_sampling_values_are_usage_errors(flag, value, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["generate", "x", flag, value])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_misspelt_option_names_the_nearest(capsys):
    assert main(["generate", "x", "--temprature", "1"]) == 2
    assert "did you mean --temperature?" in capsys.readouterr().err


def test_a_missing_model_is_exit_2(capsys):
    assert main(["generate", "x", "--target", "/nonexistent/model"]) == 2
    assert "/nonexistent/model" in capsys.readouterr().err


def test_a_draft_of_another_vocabulary_changes_no_text(run, tiny_pair):
    code, text, _ = run("x", *GREEDY, draft=str(tiny_pair.stranger))
    assert code == 0
    assert text == run("x", *GREEDY, draft=str(tiny_pair.draft))[1]


def test_ctrl_c_says_what_was_done_so_far(tiny_pair, monkeypatch, capsys):
    from forerun.engine.engine import Engine

    step, calls = Engine.step, []

    def interrupted(self):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    pair = ["--target", str(tiny_pair.target), "--draft", str(tiny_pair.draft)]
    assert main(["generate", "def f", *GREEDY, *pair]) == 130
    captured = capsys.readouterr()
    assert captured.out
    assert "tokens in" in captured.err
    assert captured.err.rstrip().endswith("forerun: interrupted")


def test_auto_is_the_draft_where_none_is_named():
    flags = partial(generate.PairFlags, target="zoo:code-40m")
    shipped = "zoo:code-2m-for-40m"
    assert flags().draft_names == (shipped, "self:int4", "suffix")
    assert flags(controller="fixed").draft_names == (shipped,)
    assert flags(k=0).draft_names == ()
    assert flags(draft=("none",)).draft_names == ()
    assert flags(draft=("models/draft",)).draft_names == ("models/draft",)
    assert generate.PairFlags().target == "zoo:smollm2-135m"


@pytest.fixture
def unshipped(monkeypatch):
    """A folder whose model is taken to be large enough to draft for itself."""
    monkeypatch.setattr(auto_drafts, "LEAST_READ_BYTES", 0)
    folder = str(zoo_path("zoo:code-2m-for-40m"))
    return generate.PairFlags(target=folder, max_context=64, threads=1, device="cpu")


def test_a_target_without_a_named_draft_uses_itself_in_4_bits(unshipped, caplog):
    params = SamplingParams(temperature=0, max_tokens=16)
    plain = load_engine(replace(unshipped, draft=("none",)), max_batch=1)
    assert plain.capabilities().methods == ()
    engine = load_engine(unshipped, max_batch=1)
    assert engine.capabilities().methods == ("self:int4", "suffix")
    assert isinstance(engine.controller, GoodputController)
    assert engine.generate("def f", params)[0].text == plain.generate("def f", params)[0].text
    assert not caplog.records


@pytest.mark.parametrize("changes", [{"k": 0}, {"draft": ("suffix",)}])
def test_a_target_that_is_asked_for_something_else_takes_no_copy(unshipped, changes):
    engine = load_engine(replace(unshipped, **changes), max_batch=1)
    assert "self:int4" not in engine.capabilities().methods


def test_a_target_without_memory_for_the_copy_decodes_without_it(unshipped, monkeypatch):
    monkeypatch.setattr(NativeModel, "in_fewer_bits", raises(NotEnoughMemory("too large")))
    assert load_engine(unshipped, max_batch=1).capabilities().methods == ("suffix",)


def raises(error):
    def fail(*_, **__):
        raise error

    return fail


def test_several_drafts_keep_their_order_where_somebody_chooses():
    pair = parse(
        "x",
        "--model",
        "zoo:code-40m",
        "--draft",
        "auto",
        "--draft",
        "suffix",
        "--controller",
        "auto",
    ).pair
    assert pair.draft_names == ("zoo:code-2m-for-40m", "self:int4", "suffix")
    pair = parse("x", "--draft", "a", "--draft", "b", "--profile", "p", "--profile", "q").pair
    assert pair.draft_names == ("a", "b")
    assert [str(path) for path in pair.profile] == ["p", "q"]


@pytest.mark.parametrize(
    ("drafts", "controller", "message"),
    [
        (("a", "a"), "auto", "--draft a is given twice"),
        (("a", "none"), "auto", "decodes plainly"),
        (("a", "suffix"), "fixed", "takes the first"),
        (("a", "suffix"), "fixed", "--controller auto"),
    ],
)
def test_drafts_that_would_do_nothing_are_refused(drafts, controller, message):
    with pytest.raises(InvalidRequest, match=message):
        generate.PairFlags(draft=drafts, controller=controller).draft_names  # noqa: B018


def test_repeatable_options():
    options = parse("x", "--stop", "a", "--stop", "b")
    assert options.sampling.params_for({}).stop == ("a", "b")


def parse(*arguments):
    return generate.COMMAND.parse("generate", arguments)


@pytest.mark.parametrize("prompt", ["caf\udce9", "-"])
def test_a_prompt_that_is_not_utf8_is_refused(prompt, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    assert main(["generate", prompt]) == 2
    assert "not UTF-8" in capsys.readouterr().err


def test_standard_input_that_never_ends_is_refused(monkeypatch, capsys):
    class Endless:
        def read(self, size):
            assert 0 < size < 1000
            return "x" * size

    monkeypatch.setattr(sys, "stdin", Endless())
    monkeypatch.setattr(generate, "MAX_PROMPT", 100)
    assert main(["generate", "-"]) == 2
    assert "more than 100 characters" in capsys.readouterr().err


def test_a_trace_that_cannot_be_written_is_exit_1(tiny_pair, tmp_path, capsys):
    trace = tmp_path / "full.jsonl"
    trace.symlink_to("/dev/full")
    pair = ["--model", str(tiny_pair.target), "--draft", str(tiny_pair.draft)]
    assert main(["generate", "def f", *GREEDY, *pair, "--trace", str(trace)]) == 1
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (("--temperature", "0"), "greedy"),
        (("--temperature", "1", "--top-p", ".9", "--verification", "token"), "token"),
        (("--temperature", ".7"), "block"),
        (("--temperature", "0.02", "--max-tokens", "100"), "walk"),
    ],
)
def test_probabilities_in_a_trace_are_those_that_decided(run, tmp_path, options, rule):
    """What was to be expected of a draft follows from the probabilities of its tokens."""
    path = tmp_path / "steps.jsonl"
    chains = ("--controller", "fixed", "--num-speculative-tokens", "3")
    given = ("--trace", str(path), "--trace-probabilities", *chains)
    draft = "suffix" if rule == "walk" else None
    assert run("a b a b a b a b", "--max-tokens", "24", *given, *options, draft=draft)[0] == 0
    steps = [item for item in read_trace(path) if isinstance(item, StepRecord) and item.num_drafted]
    assert steps
    for step in steps:
        assert step.rule == rule
        assert (step.draft_probs is not None) == (rule in ("token", "block"))
        if rule in ("token", "walk"):
            drawn_with = step.draft_probs or (1.0,) * step.num_drafted
            kept = [min(1.0, p / q) for p, q in zip(step.target_probs, drawn_with, strict=True)]
            assert step.expected_accepted == pytest.approx(sum(accumulate(kept, mul)), rel=1e-4)
        if step.num_accepted:
            assert min(step.target_probs[: step.num_accepted]) > 0


def test_a_trace_has_no_probabilities_unless_asked(run, tmp_path):
    path = tmp_path / "steps.jsonl"
    assert run("def f", *SEEDED, "--trace", str(path))[0] == 0
    steps = [item for item in read_trace(path) if isinstance(item, StepRecord)]
    assert all(step.target_probs is step.draft_probs is step.rule is None for step in steps)


def test_probabilities_need_a_trace(run):
    code, _, err = run("def f", "--trace-probabilities")
    assert code == 2
    assert "--trace-probabilities needs --trace FILE" in err
