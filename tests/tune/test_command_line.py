"""Command lines of servers are read and written with another speculation, and lose no word."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.client.urls import hide_keys, hide_printed_keys
from forerun.errors import InvalidRequest
from forerun.tune.arms import Arm, Speculation
from forerun.tune.command_line import DIALECTS, parse_command, plan_arms, show_command

NGRAM = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'

# Written after commands of these threads; names of models are changed.
PUBLIC = {
    "https://github.com/vllm-project/vllm/issues/16883": (
        f"vllm serve ./m --host 0.0.0.0 --dtype auto \\\n --speculative-config '{NGRAM}' \\\n"
        """ --rope-scaling '{"factor": 4.0}' --port 8080""",
        Speculation(method="ngram", k=5, options=(("prompt_lookup_max", "4"),)),
        "vllm serve ./m --dtype auto --rope-scaling",
    ),
    "https://github.com/vllm-project/vllm/issues/9400": (
        "A=7 python -m vllm.entrypoints.openai.api_server --model ./m -tp 1 --speculative_model "
        "[ngram] --num_speculative_tokens 5 --ngram_prompt_lookup_max 4 --seed 4 --port 9001",
        Speculation(method="ngram", k=5, options=(("prompt_lookup_max", "4"),)),
        "A=7 python -m vllm.entrypoints.openai.api_server --model ./m -tp 1 --seed 4 --host",
    ),
    "https://github.com/vllm-project/vllm/issues/26328": (
        "  vllm serve m/oss\n  --tensor-parallel 2\n  --speculative-config "
        """'{"model": "m/e3", "num_speculative_tokens": 3, "method":"eagle3", "dtype":"x"}'""",
        Speculation(method="eagle3", draft="m/e3", k=3, options=(("dtype", '"x"'),)),
        "vllm serve m/oss --tensor-parallel 2 --host",
    ),
    "https://github.com/vllm-project/vllm/issues/31883": (
        r"$ vllm serve m/a \ --dtype bfloat16 \ --port 8199 "
        r"""\ --speculative_config '{"model": "/m/b_6B", "num_speculative_tokens": 5}'""",
        Speculation(method="draft", draft="/m/b_6B", k=5),
        "vllm serve m/a --dtype bfloat16 --host",
    ),
    "https://github.com/sgl-project/sglang/issues/3362": (
        "python -m sglang.launch_server --model m/a --port 9001 --speculative-algo EAGLE "
        "--speculative-draft m/e --speculative-num-steps 5 --speculative-eagle-topk 8 "
        "--speculative-num-draft-tokens 64 --mem-fraction 0.7",
        Speculation(
            method="EAGLE",
            draft="m/e",
            k=5,
            options=(("--speculative-eagle-topk", "8"), ("--speculative-num-draft-tokens", "64")),
        ),
        "python -m sglang.launch_server --model m/a --mem-fraction 0.7 --host",
    ),
    "https://github.com/sgl-project/SpecForge/issues/310": (
        "sglang serve --model-path m/a --speculative-algorithm EAGLE3 --chunked-prefill-size -1 "
        "--speculative-draft-model-path m/e --speculative-num-steps 4 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 24 --host 0.0.0.0",
        Speculation(method="EAGLE3", draft="m/e", k=4),
        "sglang serve --model-path m/a --chunked-prefill-size -1 --host",
    ),
    "https://github.com/ggml-org/llama.cpp/issues/12968": (
        "llama-server -c 512 -cd 512 -m /m/a.gguf -md /m/b.gguf -ngld 99 -fa --draft-max 3",
        Speculation(
            method="draft-simple", draft="/m/b.gguf", k=3, options=(("-cd", "512"), ("-ngld", "99"))
        ),
        "llama-server -c 512 -m /m/a.gguf -fa --host",
    ),
    "https://github.com/ggml-org/llama.cpp/pull/11318": (
        "llama-server \\\n -hf  org/A-GGUF \\\n -hfd org/B-GGUF -t 1 --draft-max 16 "
        "--draft-min 2 \\",
        Speculation(
            method="draft-simple", draft="org/B-GGUF", k=16, options=(("--draft-min", "2"),)
        ),
        "llama-server -hf org/A-GGUF -t 1 --host",
    ),
    "https://github.com/ggml-org/llama.cpp/pull/22546": (
        "./build/bin/llama-server --port 1234 --spec-ngram-simple-size-m 4 -m /m/a.gguf "
        "--spec-type ngram-simple",
        Speculation(method="ngram-simple", k=4),
        "./build/bin/llama-server -m /m/a.gguf --host",
    ),
    "docs/operating.md": (
        "forerun serve zoo:code-11m --draft suffix --k=3 --max-batch 4 --controller fixed",
        Speculation(method="suffix", k=3, options=(("--controller", "fixed"),)),
        "forerun serve zoo:code-11m --max-batch 4 --draft none --host",
    ),
}


def plan(text: str, drafts: tuple[str, ...] = (), ks: tuple[int, ...] = ()) -> dict[str, Arm]:
    arms = plan_arms(parse_command(text), drafts, ks, itertools.count(9000))
    assert len({arm.name for arm in arms}) == len(arms) == len({arm.url for arm in arms})
    return {arm.name: arm for arm in arms}


@pytest.mark.parametrize("source", PUBLIC)
def test_public_commands_are_read(source: str) -> None:
    text, speculation, plain = PUBLIC[source]
    command = parse_command(text)
    assert command.speculation == speculation
    first, own, *others = plan(text).values()
    assert first.name == "none"
    assert first.started_command.startswith(plain)
    assert f" --port {first.url[-7:-3]}" in first.started_command
    assert own.speculation == speculation
    assert 2 <= len(others) <= 7


@pytest.mark.parametrize("source", PUBLIC)
def test_a_command_is_shown_as_it_was_typed(source: str) -> None:
    text, speculation, _ = PUBLIC[source]
    command = parse_command(text)
    shown = show_command(command, speculation)
    assert parse_command(shown) == replace(command, typed=parse_command(shown).typed)
    assert "127.0.0.1" not in shown


def test_host_port_and_key_are_replaced() -> None:
    text = "vllm serve m --api-key secret --uds /tmp/s --port=1 --max-num-seqs 4 --host ::"
    none = plan(text)["none"]
    assert none.started_command == "vllm serve m --max-num-seqs 4 --host 127.0.0.1 --port 9000"
    assert "--api-key secret" in show_command(parse_command(text), Speculation())


def test_a_wrapper_stays_in_front() -> None:
    arm = plan("export B=2\ntaskset -c 0 uv run llama-server -m a.gguf")["none"]
    assert arm.command[:5] == ("taskset", "-c", "0", "uv", "run")
    assert dict(arm.environment) == {"B": "2"}


def test_variables_and_the_home_folder_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    assert parse_command("M=x vllm serve ~/${M}/$M").model == "/home/u/x/x"


@pytest.mark.parametrize(
    "words",
    [
        f"--speculative-config '{NGRAM}'",
        f"-sc='{NGRAM}'",
        f"--speculative_config={shlex.quote(NGRAM)}",
        "--speculative-config.method ngram -sc.num_speculative_tokens=5 -sc.prompt-lookup-max 4",
        "--spec-method ngram --spec-tokens 5 -sc.prompt_lookup_max 4",
        "--speculative-model [ngram] --num-speculative-tokens=5 --ngram-prompt-lookup-max 4",
    ],
)
def test_every_spelling_of_vllm_is_read(words: str) -> None:
    assert parse_command(f"vllm serve m {words}").speculation == Speculation(
        method="ngram", k=5, options=(("prompt_lookup_max", "4"),)
    )


@pytest.mark.parametrize("word", ["", "-sc null", "-sc '{}'"])
def test_a_command_without_speculation_has_no_arm_of_its_own(word: str) -> None:
    assert list(plan(f"vllm serve m {word}")) == ["none", "ngram K=2", "ngram K=4", "suffix"]


def test_flags_that_vllm_has_dropped_are_written_as_json() -> None:
    text = "vllm serve m --speculative-model d --num-speculative-tokens 3 --speculative-other 1"
    own = plan(text)["draft d K=3"]
    assert own.command[3:7] == (
        *("--speculative-config", '{"model": "d", "num_speculative_tokens": 3}'),
        *("--speculative-other", "1"),
    )


def test_flags_of_older_builds_of_llama_cpp_are_kept() -> None:
    arms = plan("llama-server -m a.gguf -md b.gguf --draft-max 16 --draft-min 5")
    assert arms["draft-simple b.gguf K=4"].command[3:7] == ("-md", "b.gguf", "--draft-max", "4")
    assert "--draft-min" in arms["draft-simple b.gguf K=8"].command


def test_a_draft_of_llama_cpp_has_a_type() -> None:
    own = plan("llama-server -m a.gguf -md b.gguf -ngld 9")["draft-simple b.gguf"]
    assert own.command[3:9] == ("--spec-type", "draft-simple", "-md", "b.gguf", "-ngld", "9")


def test_a_chain_of_sglang_verifies_one_token_more_than_it_drafts() -> None:
    arm = plan("sglang serve --model m", ("eagle3:org/e",), (5,))["EAGLE3 e K=5"]
    assert arm.command[4:14] == tuple(
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path org/e "
        "--speculative-num-steps 5 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 6".split()
    )


def test_drafts_and_k_are_those_that_are_named() -> None:
    arms = plan("vllm serve m", ("eagle3:/d/e", "org/b", "mtp", "none"), (3,))
    assert list(arms) == [
        *("none", "ngram K=3", "suffix", "eagle3 e K=3", "draft b K=3", "mtp K=3"),
    ]
    arms = plan("forerun serve zoo:code-11m", ("zoo:code-2m", "self:2"), (6,))
    assert list(arms) == ["none", "auto", "draft zoo:code-2m K=6", "draft self:2 K=6"]
    fixed = "--draft zoo:code-2m --k 6 --controller fixed"
    assert fixed in arms["draft zoo:code-2m K=6"].started_command


def test_the_kind_of_a_draft_is_in_its_config(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    arms = plan("sglang serve --model m", (str(tmp_path),), (2,))
    assert f"EAGLE3 {tmp_path.name} K=2" in arms


def test_drafts_at_hand_are_tried() -> None:
    arms = plan("forerun serve zoo:code-40m")
    assert list(arms)[:3] == ["none", "auto", "draft zoo:code-2m-for-40m"]
    assert {"suffix", "recycling", "self:int4", "draft zoo:eagle3-for-40m K=4"} <= set(arms)


def test_drafts_of_one_name_in_two_folders_are_two_arms() -> None:
    assert len(plan("llama-server -m a.gguf", ("/x/b.gguf", "/y/b.gguf"), (2,))) == 6


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the command is empty"),
        ("A=1", "the command is empty"),
        ("bash start.sh", "starts no server that tune knows"),
        ("vllm serve 'm", "No closing quotation"),
        ("vllm serve", "names no model"),
        ("llama-server --port 1", "names no model"),
        ("vllm serve m -sc {'method':'ngram'}", "put single quotes"),
        ("vllm serve m -sc '[1]'", "must be a JSON object"),
        ("vllm serve m -sc.num_speculative_tokens many", "must be a whole number"),
        ("llama-server -m a --spec-draft-n-max x", "must be a whole number"),
        ("llama-server --fim-qwen-7b-spec", "names no model"),
        ("llama-server -m a --fim-qwen-7b-spec", "names both models"),
        ("LLAMA_ARG_SPEC_TYPE=ngram-mod llama-server -m a", "write its flag"),
        ("vllm serve m > log 2>&1 &", "starts no shell"),
        ("llama-server ... -m a", "starts no shell"),
        ("vllm serve $NO_SUCH_NAME_HERE", "has no value here"),
        ("docker run --gpus all vllm/vllm-openai --model m", "--arm NAME=URL"),
        ("sudo podman run x vllm serve m", "--arm NAME=URL"),
    ],
)
def test_a_command_that_cannot_be_used_is_refused_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason.replace(".", r"\.")) as error:
        parse_command(text)
    assert "\n" not in str(error.value)


def test_a_method_without_its_weights_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="eagle3:PATH"):
        plan("vllm serve m", ("eagle3",))


@pytest.mark.parametrize("draft", ["", " ", "eagle3:"])
def test_a_draft_without_a_name_is_refused(draft: str) -> None:
    with pytest.raises(InvalidRequest, match="names no draft: write PATH or METHOD:PATH"):
        plan("vllm serve m", (draft,))


def test_a_file_that_sets_speculation_is_refused(tmp_path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: m\n")
    assert parse_command(f"vllm serve --config {file}").model is None
    file.write_text("speculative-config:\n  method: ngram\n")
    with pytest.raises(InvalidRequest, match="move these settings"):
        parse_command(f"vllm serve --config {file}")


PROGRAMS = ("vllm serve m", "sglang serve --model m", "llama-server -m m", "forerun serve m")
TAKEN = {
    "vllm": ("--speculative-config", "-sc.k", "--spec-model", "--uds"),
    "sglang": ("--speculative-token-map", "--speculative-draft-model-path"),
    "llamacpp": ("-ngld", "-md", "--spec-draft-p-min", "--threads-draft"),
    "forerun": ("--draft", "--profile", "--tree"),
}
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="$"), min_size=1, max_size=8)
WORDS = WORDS.filter(lambda word: word not in ("none", "7"))  # values of flags that are written


@given(st.sampled_from(PROGRAMS), st.lists(WORDS.map(lambda word: f"--x{word}") | WORDS), st.data())
def test_no_word_is_lost(program: str, rest: list[str], data: st.DataObject) -> None:
    """Words of speculation and of the address go to their places, the others keep their order."""
    words = [f"x{word}" if word.startswith("-") and word[:3] != "--x" else word for word in rest]
    engine = next(d for d in DIALECTS.values() if d.read(shlex.split(program)))
    flags = data.draw(st.lists(st.sampled_from((*TAKEN[engine.name], "--port", "--host"))))
    units = [[word] for word in words]
    for flag in flags:
        value = '{"method": "suffix"}' if flag == "--speculative-config" else "7"
        unit = [f"{flag}={value}"] if data.draw(st.booleans()) else [flag, value]
        units.insert(data.draw(st.integers(0, len(units))), unit)
    typed = [*shlex.split(program), *itertools.chain(*units)]
    command = engine.read(typed)
    assert command is not None
    places = (*command.program, *command.arguments, *command.typed, *command.address)
    assert len(places) >= len(typed)
    kept = engine.write(command, Speculation(), None)
    assert [word for word in kept if word in words] == [word for word in typed if word in words]


@given(
    st.sampled_from(["eagle", "ngram", "medusa"]),
    st.none() | st.integers(1, 99),
    st.dictionaries(WORDS.filter(lambda w: w.isidentifier()), st.none() | st.integers() | WORDS),
)
def test_a_configuration_of_vllm_is_read_as_it_is_written(method, k, other) -> None:
    config = {"method": method, "num_speculative_tokens": k, **other}
    text = shlex.join(["vllm", "serve", "m", "-sc", json.dumps(config)])
    command = parse_command(text)
    dialect = DIALECTS["vllm"]
    again = dialect.read(["vllm", "serve", "m", *dialect.write_flags(command.speculation, command)])
    assert again is not None and again.speculation == command.speculation


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("DB_PASS=X my-server --port {port}", "DB_PASS=... my-server --port {port}"),
        ("HF_TOKEN='a b' my-server", "HF_TOKEN=... my-server"),
        (shlex.join(["HF_TOKEN=a'b c", "x"]), "HF_TOKEN=... x"),
        ("vllm serve m --api-key a b --port 3", "vllm serve m --api-key ... ... --port 3"),
        ("vllm serve --api_key \\\n a", "vllm serve --api_key \\\n ..."),
        ("x --hf-token 'a b' m --max-tokens 5", "x --hf-token ... m --max-tokens 5"),
        ("x -mu https://me:pw@host/m.gguf?sig=1&b=2", "x -mu https://…@host/m.gguf?..."),
        ("x --password 'unclosed pw", "x --password ..."),
    ],
)
def test_secrets_of_a_command_are_hidden(command: str, shown: str) -> None:
    assert hide_keys(command) == shown


@given(st.lists(st.text(max_size=6) | st.sampled_from(["--api-key", "A_KEY=x y", "--token=z'12"])))
def test_hiding_keeps_every_word_in_its_place(words: list[str]) -> None:
    assert len(shlex.split(hide_keys(shlex.join(words)))) == len(words)
    shown = hide_printed_keys("it says x yz and z'12", ["A_KEY=x yz", *words, "--token=z'12"])
    assert "x yz" not in shown and "z'12" not in shown


def test_several_keys_of_vllm_are_of_its_address() -> None:
    command = parse_command("vllm serve m --api-key sk-1 sk-2 --seed 4")
    assert command.address == ("--api-key", "sk-1", "sk-2")
    assert command.arguments == ("m", "--seed", "4")


def test_keys_are_not_shown() -> None:
    text = "HF_TOKEN=hf_1 OPENAI_API_KEY='a b' vllm serve m --api-key sk-2 --max-num-seqs 8"
    arms = plan_arms(parse_command(text), (), (), iter(range(9000, 9100)))
    for arm in arms:
        for shown in (arm.shown_command, arm.started_command):
            assert not re.search("hf_1|a b|sk-2", shown)
        assert arm.environment["HF_TOKEN"] == "hf_1"
    assert "--api-key ..." in arms[0].shown_command
