"""The EAGLE-3 head computes what its description says, and its files are read as written."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.heads import causal

from forerun.drafters.eagle3.head import (
    LAYER_IDS,
    Eagle3Config,
    Eagle3Head,
    default_feature_layers,
    origin_of_layers,
)
from forerun.drafters.eagle3.load import read_eagle3_head, write_eagle3_head
from forerun.errors import InvalidModel

WIDTH, TARGET_VOCAB, DRAFT_VOCAB = 32, 50, 12


def config(**changes):
    fields = {
        "target_hidden_size": WIDTH,
        "target_vocab_size": TARGET_VOCAB,
        "feature_layers": (1, 2, 4),
        "draft_vocab_size": DRAFT_VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
    }
    return Eagle3Config(**{**fields, **changes})


def random_head(seed=0, **changes):
    torch.manual_seed(seed)
    target_ids = torch.randperm(TARGET_VOCAB)[:DRAFT_VOCAB].sort().values
    head = Eagle3Head(config(**changes), target_ids)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return head.eval()


def norm(vector, weight, eps):
    mean_square = sum(v * v for v in vector) / len(vector)
    return [w * v / (mean_square + eps) ** 0.5 for v, w in zip(vector, weight, strict=True)]


def times(matrix, vector):
    return [sum(m * v for m, v in zip(row, vector, strict=True)) for row in matrix]


def rotated(vector, position, theta=10000.0):
    half = len(vector) // 2
    out = list(vector)
    for i in range(half):
        angle = torch.tensor(position * theta ** (-i / half), dtype=torch.float64)
        c, s = angle.cos().item(), angle.sin().item()
        out[i] = vector[i] * c - vector[half + i] * s
        out[half + i] = vector[half + i] * c + vector[i] * s
    return out


def slow_rows(head, embedded, states):
    """Every row by loops over plain numbers: outputs before the final norm, and logits."""
    c = head.config
    w = {name: value.double().tolist() for name, value in head.state_dict().items()}
    layer = "layers.0."
    groups = c.num_heads // c.num_kv_heads
    keys, values, outputs, logits = [], [], [], []
    for t, (e, g) in enumerate(zip(embedded, states, strict=True)):
        h = norm(g, w[f"{layer}hidden_norm.weight"], c.norm_eps)
        x = norm(e, w[f"{layer}input_layernorm.weight"], c.norm_eps) + h
        residual = h if c.norm_before_residual else g
        q = times(w[f"{layer}self_attn.q_proj.weight"], x)
        k = times(w[f"{layer}self_attn.k_proj.weight"], x)
        v = times(w[f"{layer}self_attn.v_proj.weight"], x)
        parts = [slice(i * c.head_dim, (i + 1) * c.head_dim) for i in range(c.num_heads)]
        keys.append([rotated(k[p], t) for p in parts[: c.num_kv_heads]])
        values.append([v[p] for p in parts[: c.num_kv_heads]])
        attended = []
        for i, p in enumerate(parts):
            query = rotated(q[p], t)
            scores = [
                sum(a * b for a, b in zip(query, row[i // groups], strict=True)) / c.head_dim**0.5
                for row in keys
            ]
            weights = torch.tensor(scores, dtype=torch.float64).softmax(0).tolist()
            for d in range(c.head_dim):
                attended.append(
                    sum(a * row[i // groups][d] for a, row in zip(weights, values, strict=True))
                )
        mixed = times(w[f"{layer}self_attn.o_proj.weight"], attended)
        hidden = [r + m for r, m in zip(residual, mixed, strict=True)]
        n = norm(hidden, w[f"{layer}post_attention_layernorm.weight"], c.norm_eps)
        gate = times(w[f"{layer}mlp.gate_proj.weight"], n)
        up = times(w[f"{layer}mlp.up_proj.weight"], n)
        inner = [
            a / (1 + torch.tensor(-a, dtype=torch.float64).exp().item()) * b
            for a, b in zip(gate, up, strict=True)
        ]
        down = times(w[f"{layer}mlp.down_proj.weight"], inner)
        output = [a + b for a, b in zip(hidden, down, strict=True)]
        outputs.append(output)
        logits.append(times(w["lm_head.weight"], norm(output, w["norm.weight"], c.norm_eps)))
    return torch.tensor(outputs), torch.tensor(logits)


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_rows_equal_a_loop_over_numbers(norm_before_residual):
    head = random_head(norm_before_residual=norm_before_residual)
    embedded, features = torch.randn(5, WIDTH), torch.randn(5, 3, WIDTH)
    with torch.no_grad():
        states = head.fuse(features)
        output = head(embedded, states, torch.arange(5), causal)
        logits = head.logits(output)
    slow_output, slow_logits = slow_rows(head, embedded.tolist(), states.tolist())
    torch.testing.assert_close(output, slow_output, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(logits, slow_logits, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("flag", ["norm_before_fc", "fc_norm"])
def test_states_are_normed_before_fc(flag):
    head = random_head(**{flag: True})
    features = torch.randn(3, 3, WIDTH)
    for state in features:
        flat = state.flatten().tolist()
        if flag == "norm_before_fc":
            flat = norm(flat, head.input_norm.weight.tolist(), 1e-6)
        else:
            flat = [
                value
                for part, weight in zip(state.tolist(), head.fc_norm, strict=True)
                for value in norm(part, weight.weight.tolist(), 1e-6)
            ]
        expected = torch.tensor(times(head.fc.weight.tolist(), flat))
        torch.testing.assert_close(head.fuse(state), expected, atol=1e-4, rtol=1e-4)


def test_fed_back_state_is_normed_only_with_norm_output():
    head, normed = random_head(), random_head(norm_output=True)
    output = torch.randn(2, WIDTH)
    assert torch.equal(head.fed_back(output), output)
    assert torch.equal(normed.fed_back(output), normed.norm(output))


@pytest.mark.parametrize("form", ["speculators", "raw"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True, "norm_output": True, "fc_norm": True},
        {"norm_before_fc": True, "rope": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {"own_embedding": True},
    ],
)
def test_written_heads_are_read_again(tmp_path, form, changes):
    head = random_head(**changes)
    write_eagle3_head(head, tmp_path, form=form, target="a/target")
    found = read_eagle3_head(tmp_path)
    assert found.config == head.config
    for name, tensor in head.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


def test_matrices_in_int8_are_read_within_half_a_step(tmp_path):
    head = random_head()
    write_eagle3_head(head, tmp_path, form="int8", target="t")
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["fc.weight"].dtype == torch.int8
    found = read_eagle3_head(tmp_path).state_dict()
    for name, tensor in head.state_dict().items():
        step = stored[name + "_scale"] / 2 if tensor.ndim == 2 else 0.0
        assert ((found[name].float() - tensor.float()).abs() <= step + 1e-6).all(), name
    stored["fc.weight_scale"] = stored["fc.weight_scale"][1:]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(
        InvalidModel, match=r"fc.weight_scale but no int8 fc.weight of as many rows"
    ):
        read_eagle3_head(tmp_path)


def test_raw_files_name_layers_in_both_conventions(tmp_path):
    write_eagle3_head(random_head(), tmp_path, form="raw", target="t")
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert settings["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3]
    assert "midlayer.hidden_norm.weight" in load_file(tmp_path / "model.safetensors")
    del settings["eagle_aux_hidden_state_layer_ids"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert read_eagle3_head(tmp_path).config.feature_layers == (1, 2, 4)
    del settings["eagle_config"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert read_eagle3_head(tmp_path, num_target_layers=12).config.feature_layers == (2, 6, 9)
    with pytest.raises(InvalidModel, match="names no layers"):
        read_eagle3_head(tmp_path)


def test_default_layers_need_five():
    assert default_feature_layers(36) == (2, 18, 33)
    with pytest.raises(InvalidModel, match="4 layers"):
        default_feature_layers(4)


def missing(tensors):
    del tensors["norm.weight"]


def additional(tensors):
    tensors["layers.0.self_attn.q_proj.bias"] = torch.zeros(32)


def misshapen(tensors):
    tensors["fc.weight"] = torch.zeros(WIDTH, 2 * WIDTH)


def out_of_range(tensors):
    tensors["d2t"][-1] = TARGET_VOCAB


def below_zero(tensors):
    tensors["d2t"][0] = -1


def absolute(tensors):
    tensors["d2t"] = tensors["d2t"] + torch.arange(DRAFT_VOCAB)


def repeated(tensors):
    tensors["d2t"][1] = tensors["d2t"][0] - 1


def no_map(tensors):
    del tensors["d2t"]


def wrong_marks(tensors):
    tensors["t2d"] = ~tensors["t2d"]


def as_many_other_marks(tensors):
    tensors["t2d"] = tensors["t2d"].roll(1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (missing, "lacks 1 tensors, the first norm.weight"),
        (additional, "1 tensors, the first layers.0.self_attn.q_proj.bias"),
        (misshapen, r"fc.weight .* has the shape \(32, 64\)"),
        (out_of_range, "outside the target's 50 tokens"),
        (below_zero, "maps draft token 0 to -1, outside the target's 50 tokens"),
        (absolute, "d2t"),
        (repeated, "two draft tokens"),
        (no_map, "no d2t"),
        (wrong_marks, "t2d .* marks 38 tokens"),
        (as_many_other_marks, "t2d .* marks 12 tokens .* not the 12 tokens of d2t"),
    ],
)
def test_damaged_tensors_are_named(tmp_path, damage, message):
    write_eagle3_head(random_head(), tmp_path, target="t")
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InvalidModel, match=message):
        read_eagle3_head(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("norm_output", "yes", "true or false"),
        ("draft_vocab_size", 51, "from 1 to the target's 50"),
        ("eagle_aux_hidden_state_layer_ids", [1, "2"], "must list layers"),
        ("norm_before_fc", True, "input_norm.weight"),
        ("target_hidden_size", 48, "48 wide"),
    ],
)
def test_wrong_settings_are_named(tmp_path, field, value, message):
    write_eagle3_head(random_head(), tmp_path, target="t")
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {field: value}))
    with pytest.raises(InvalidModel, match=message):
        read_eagle3_head(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_hidden_layers", 2, "2 layers"),
        ("hidden_act", "gelu", "gelu"),
        ("attention_bias", True, "attention_bias"),
        ("model_type", "qwen3", "qwen3"),
        ("rope_parameters", {"rope_type": "yarn"}, "yarn"),
        ("rope_theta", -1, "positive"),
        ("num_key_value_heads", 3, "cannot share"),
        ("hidden_size", None, "hidden_size"),
    ],
)
def test_unsupported_layers_are_named(tmp_path, field, value, message):
    write_eagle3_head(random_head(), tmp_path, target="t")
    settings = json.loads((tmp_path / "config.json").read_text())
    layer = settings["transformer_layer_config"]
    layer[field] = value
    if field == "rope_theta":
        layer["rope_parameters"] = None
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(InvalidModel, match=message):
        read_eagle3_head(tmp_path)


def test_both_norms_before_fc_are_refused():
    with pytest.raises(InvalidModel, match="not both"):
        config(norm_before_fc=True, fc_norm=True)


def test_layers_that_config_json_does_not_name_are_said_to_be_assumed():
    assert "config.json names" in origin_of_layers({LAYER_IDS: [1, 2]}, (1, 2))
    for settings in ({}, {LAYER_IDS: []}, {"eagle_config": {}}):
        assert "[2, 6, 9] are assumed, because" in origin_of_layers(settings, (2, 6, 9))
