"""Every name in the README's sentence of supported models, and the page made from the tables."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.models.families import FAMILIES

ROOT = Path(__file__).parents[3]
# The words of the README, and the classes that they promise.
NAMED = {
    "Llama": "Llama",
    "Mistral": "Mistral",
    "Qwen2": "Qwen2",
    "Qwen3": "Qwen3",
    "Gemma 1 to 3": "Gemma Gemma2 Gemma3",
    "OLMo 2": "Olmo2",
    "OLMo 3": "Olmo3",
    "Phi-3": "Phi3",
    "SmolLM3": "SmolLM3",
    "Granite": "Granite",
    "GLM-4": "Glm4",
    "Qwen3-MoE": "Qwen3Moe",
    "Mixtral": "Mixtral",
    "Gemma 4": "Gemma4",
    "gpt-oss": "GptOss",
    "Cohere": "Cohere Cohere2",
    "DeepSeek-V3": "DeepseekV3",
    "Qwen3-Next": "Qwen3Next",
    "Qwen3.5": "Qwen3_5 Qwen3_5Moe",
    "LFM2": "Lfm2 Lfm2Moe",
    "Mamba 2": "Mamba2",
    "Falcon-H1": "FalconH1",
    "Nemotron-H": "NemotronH",
}


def test_the_readme_names_supported_models_and_their_number():
    text = " ".join((ROOT / "README.md").read_text().split())
    found = re.search(r"targets are (\d+) model classes of transformers: (.*?), \[through", text)
    assert found is not None and int(found[1]) == len(FAMILIES)
    named = re.split(r"; |, | and | or |such as ", found[2])
    names = {part for part in named if re.search(r"[A-Z0-9]|gpt", part)}
    assert {name.removesuffix(" on every runner") for name in names} == NAMED.keys()
    for families in NAMED.values():
        assert {f"{family}ForCausalLM" for family in families.split()} <= FAMILIES.keys()


def test_the_readme_and_the_page_agree_on_runners():
    readme = " ".join((ROOT / "README.md").read_text().split())
    page = (ROOT / "docs" / "models.md").read_text()
    runners = dict(re.findall(r"^\| (\w+)ForCausalLM \| ([\w, ]+) \|", page, re.MULTILINE))
    every, native, modules = re.search(
        r"of transformers: (.*?); on the native (.*?); (other .*?), \[through", readme
    ).groups()
    promised = {every: "native, graphs, eager", native: "native, eager", modules: "eager"}
    for part, expected in promised.items():
        names = re.split(r", | and | or |such as ", part)
        names = [name.removesuffix(" on every runner") for name in names]
        families = [family for name in names for family in NAMED.get(name, "").split()]
        assert families and {runners[family] for family in families} == {expected}


@pytest.mark.full
def test_the_page_is_up_to_date():
    command = [sys.executable, ROOT / "recipes" / "docs" / "models.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
