"""`forerun align --method eagle3` from prompts to a head that the engine runs."""

from __future__ import annotations

import json
import shutil

import pytest
from tests.profiles import exact_times
from tests.system.conftest import byte_tokenizer, save_model

from forerun.cli.command import Exit
from forerun.cli.main import main
from forerun.drafters.eagle3.load import read_eagle3_head
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.observing import EmittedRecords
from forerun.measure.judge import attached_acceptance, head_in
from forerun.sampling.config import SamplingParams
from forerun.theory.record import StepRecord

ARGUMENTS = (
    *("--temperatures", "0"),
    *("--max-tokens", "12", "--threads", "1", "--num-steps", "4", "--num-evaluations", "2"),
    *("--max-prompts", "4", "--window", "48", "--tokens-per-step", "192", "--k", "2"),
    *("--held-out-share", "0.3", "--json", "--no-prediction"),
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deep") / "target"
    save_model(folder, num_layers=5, seed=1)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def aligned(target, prompts, tmp_path_factory):
    out = tmp_path_factory.mktemp("aligned") / "run"
    assert main(command(target, prompts, out, "--export", "vllm", "--export", "sglang")) == 0
    return out


def command(target, prompts, out, *more):
    files = ("--target", str(target), "--prompts", str(prompts), "--out", str(out))
    return ["align", "--method", "eagle3", *files, *ARGUMENTS, *more]


def test_a_head_is_trained_judged_and_carded(aligned):
    report = json.loads((aligned / "report.json").read_text())
    assert [judgement["step"] for judgement in report["judgements"]] == [0, 2, 4]
    assert [pair["after"]["temperature"] for pair in report["judged"]] == [1.0, 0.0]
    for pair in report["judged"]:
        figures = pair["after"]["overall"]
        assert 1 <= figures["acceptance_length"]["estimate"] <= 3
        assert 0 <= figures["acceptance_probability"]["estimate"] <= 1
    card = json.loads((aligned / "draft" / "forerun.json").read_text())
    assert card["settings"]["method"] == "eagle3"


def test_alpha_tells_which_greedy_drafts_are_accepted(aligned, target):
    """At T=0 with one drafted token: a step accepts exactly where alpha is 1."""
    config = EngineConfig(num_speculative_tokens=1, controller="fixed", num_threads=1)
    draft = aligned / "draft"
    engine = Engine.load(str(target), dtype="float32", draft=str(draft), config=config)
    head = head_in(draft, engine.target)
    assert head is not None
    records: list[StepRecord] = []
    engine.observers[:] = [EmittedRecords(records.append)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    (output,) = engine.generate(["def f(x):\n"], params)
    accepted = [record.num_accepted for record in records if record.num_drafted == 1]
    alphas = attached_acceptance(
        engine.target, head, output.prompt_token_ids, output.token_ids, params
    )
    assert len(alphas) == len(output.token_ids) == 24
    place, expected = 1, []  # reading the prompt emits the first token
    while len(expected) < len(accepted):
        expected.append(int(alphas[place] == 1))
        place += 1 + expected[-1]
    assert expected == accepted
    assert len(accepted) > 8


def test_the_engine_decodes_with_it(aligned, target):
    plain = Engine.load(str(target), dtype="float32")
    engine = Engine.load(
        str(target),
        dtype="float32",
        draft=str(aligned / "draft"),
        config=EngineConfig(num_speculative_tokens=2, controller="fixed"),
    )
    params = SamplingParams(temperature=0, max_tokens=16)
    expected, found = (e.generate(["def g(x):\n"], params)[0].token_ids for e in (plain, engine))
    assert found == expected


def test_it_is_exported_for_both_engines(aligned):
    serving = aligned / "draft" / "serving"
    vllm = json.loads((serving / "vllm.json").read_text())
    assert vllm["speculative_config"]["method"] == "eagle3"
    settings = json.loads((aligned / "draft" / "config.json").read_text())
    assert settings["speculators_model_type"] == "eagle3"
    raw = json.loads((serving / "sglang" / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"]
    one, other = read_eagle3_head(aligned / "draft"), read_eagle3_head(serving / "sglang")
    assert one.config == other.config
    assert "speculative-algorithm EAGLE3" in (serving / "README.md").read_text()


def test_a_finished_run_is_shown_again_and_refreshed(aligned, target, prompts, tmp_path, capsys):
    assert main(command(target, prompts, aligned)) == 0
    assert "finished before" in capsys.readouterr().err
    out = tmp_path / "again"
    profile = tmp_path / "profile.json"
    pair = ("--target", str(target), "--draft", str(aligned / "draft"), "--threads", "1")
    sizes = ("--rows", "1,2,3,5", "--batch", "1", "--context", "24", "--budget-s", "0.1")
    assert main(["profile", *pair, *sizes, "--out", str(profile)]) == 0
    exact_times(profile)
    refresh = ("--refresh", str(aligned), "--out", str(out), "--num-steps", "2", "--threads", "1")
    assert main(["align", *refresh, "--profile", str(profile), "--json"]) == 0
    report = json.loads((out / "report.json").read_text())
    first = report["judged"][0]["before"]["overall"]["acceptance_length"]
    last = json.loads((aligned / "report.json").read_text())
    assert first == last["judged"][0]["after"]["overall"]["acceptance_length"]
    assert last["judged"][0]["after"]["overall"]["speedup"] is None
    assert report["judged"][0]["after"]["overall"]["speedup"]["best"]["estimate"] > 0


def test_medusa_heads_are_trained_judged_and_exported(target, prompts, tmp_path):
    out = tmp_path / "medusa"
    arguments = command(target, prompts, out, "--export", "vllm", "--method", "medusa")
    assert main(arguments) == 0
    report = json.loads((out / "report.json").read_text())
    figures = report["judged"][0]["after"]["overall"]
    assert 1 <= figures["acceptance_length"]["estimate"] <= 3
    settings = json.loads((out / "draft" / "serving" / "vllm" / "config.json").read_text())
    assert settings["medusa_fc_bias"] is True
    plain = Engine.load(str(target), dtype="float32")
    engine = Engine.load(str(target), dtype="float32", draft=str(out / "draft"))
    params = SamplingParams(temperature=0, max_tokens=16)
    expected, found = (e.generate(["def g(x):\n"], params)[0].token_ids for e in (plain, engine))
    assert found == expected


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--init", "config.json"), "--init does not go with --method eagle3"),
        (("--objective", "ce"), "--objective ce reads text alone"),
        (("--feature-layers", "9"), "feature_layers names [9], but the target has 5 layers"),
        (("--draft-vocab-size", "9000"), "draft_vocab_size is 9000, but the target has 257"),
    ],
)
def test_settings_a_head_cannot_have_are_refused(more, message, target, prompts, tmp_path, capsys):
    assert main(command(target, prompts, tmp_path / "out", *more)) == Exit.BAD_INPUT
    assert message in " ".join(capsys.readouterr().err.split())


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("method", ["draft_model", "eagle3", "medusa"])
def test_conversations_are_prompts_of_every_method(target, method, tmp_path):
    chat = tmp_path / "target"
    shutil.copytree(target, chat)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(chat)
    hello = {"role": "user", "content": "Hello"}
    turns = [hello, {"role": "assistant", "content": "Hi"}]
    for name, number in (("prompts", 8), ("held-out", 3)):
        lines = [
            {"messages": [*turns, {"role": "user", "content": f"{name} {i}"}]}
            for i in range(number)
        ]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out"
    files = ("--prompts", str(tmp_path / "prompts.jsonl"), "--target", str(chat))
    draft = ("--draft", str(target)) if method == "draft_model" else ()
    share = ARGUMENTS.index("--held-out-share")
    arguments = (*ARGUMENTS[:share], *ARGUMENTS[share + 2 :], "--window", "96")
    held_out = ("--held-out", str(tmp_path / "held-out.jsonl"))
    command = ["align", "--method", method, *files, *draft, *held_out, *arguments]
    assert main([*command, "--out", str(out)]) == 0
    data = json.loads((out / "report.json").read_text())["data"]
    assert (data["num_training_prompts"], data["num_held_out_prompts"]) == (8, 3)
