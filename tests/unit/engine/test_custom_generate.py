"""`speculate` within transformers' generate: the same texts, the same laws, and what is refused."""

from __future__ import annotations

import pytest
import torch
from tests import tiny
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    NoRepeatNGramLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    set_seed,
)

from forerun import speculate
from forerun.errors import ForerunError, InvalidRequest

PAD = 7
NUM_NEW = 40


def load(family="llama", **changes):
    model = tiny.network(family, max_context=128, **changes)
    model.generation_config.pad_token_id = PAD
    return model


def padded(num_rows=3, length=8):
    """Rows of 8, 6 and 3 tokens with padding on their left."""
    ids = torch.randint(1, tiny.VOCAB_SIZE, (3, length), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :2] = mask[2, :5] = 0
    return {
        "input_ids": ids.masked_fill(mask == 0, PAD)[:num_rows],
        "attention_mask": mask[:num_rows],
    }


def decode(model, callable_, **arguments):
    common = padded() | {"max_new_tokens": 8, "custom_generate": callable_}
    return model.generate(**(common | arguments))


def both(model, inputs, callable_, **arguments):
    arguments = {"max_new_tokens": NUM_NEW, "do_sample": False} | arguments
    plain = model.generate(**inputs, **arguments)
    return plain, model.generate(**inputs, **arguments, custom_generate=callable_)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_greedy_text_is_that_of_generate(family, num_rows):
    model, draft = load(family), load(family, jitter=0.02)
    for callable_ in (speculate(), speculate(draft), speculate(None)):
        plain, ours = both(model, padded(num_rows), callable_)
        torch.testing.assert_close(ours, plain)


def test_a_draft_model_is_drafted_with():
    model = load()
    callable_ = speculate(load(jitter=0.02), controller="fixed", num_speculative_tokens=3)
    both(model, padded(), callable_)
    assert callable_._engine.stats().num_accepted > 20


@pytest.mark.parametrize(
    "arguments",
    [
        {"repetition_penalty": 1.4},
        {"min_new_tokens": 30, "eos_token_id": [181, 111, 5]},
        {"eos_token_id": [181, 111, 5]},
        {"suppress_tokens": [181, 111, 5]},
        {"renormalize_logits": True, "top_k": 3},
        {"max_length": 20, "max_new_tokens": None},
        {"num_return_sequences": 1, "return_dict_in_generate": True},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_arguments_change_the_text_as_in_generate(arguments):
    model = load()
    for inputs in (padded(), padded(1)):
        plain, ours = both(model, inputs, speculate(load(jitter=0.02)), **arguments)
        if "return_dict_in_generate" in arguments:
            plain, ours = plain.sequences, ours.sequences
        torch.testing.assert_close(ours, plain)


def test_texts_end_at_several_lengths():
    plain, ours = both(load(), padded(), speculate(), eos_token_id=[181, 111, 5])
    torch.testing.assert_close(ours, plain)
    assert ours.shape[1] > 9
    assert (ours[:, 9:] == PAD).any()


def test_a_stopping_criterion_is_checked_at_every_token():
    model = load()
    tokenizer = tiny.backend()
    plain = model.generate(**padded(1), max_new_tokens=NUM_NEW, do_sample=False)
    stop = tokenizer.decode(plain[0, 20:22])
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, [stop])])
    for inputs in (padded(1), padded()):
        plain, ours = both(model, inputs, speculate(), stopping_criteria=criteria)
        torch.testing.assert_close(ours, plain)
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length=12)])
    plain, ours = both(model, padded(), speculate(), stopping_criteria=criteria)
    torch.testing.assert_close(ours, plain)
    ends = StoppingCriteriaList([MaxTimeCriteria(max_time=-1.0)])
    assert both(model, padded(), speculate(), stopping_criteria=ends)[1].shape[1] == 9


@pytest.mark.parametrize(
    "arguments",
    [{"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2, "top_k": 4}],
    ids=lambda arguments: next(iter(arguments)),
)
def test_samples_have_the_law_of_generate(arguments):
    num_samples, vocab = 4000, 6
    model = load(vocab_size=vocab, scale=0.3)
    model.generation_config.eos_token_id = None
    draft = load(vocab_size=vocab, scale=0.3, jitter=0.1)
    callable_ = speculate(draft, controller="fixed", num_speculative_tokens=2)
    inputs = {"input_ids": torch.tensor([[1, 2, 3]])}
    common = {
        "max_new_tokens": 2,
        "do_sample": True,
        "top_k": 0,
        "num_return_sequences": num_samples,
    }
    set_seed(1)
    ours = model.generate(**inputs, **(common | arguments), custom_generate=callable_)
    scores = model.generate(
        ours[:, :3],
        **(common | arguments | {"num_return_sequences": 1, "max_new_tokens": 1}),
        output_scores=True,
        return_dict_in_generate=True,
    ).scores[0][0]
    law = torch.zeros(vocab, vocab)
    for first, prob in enumerate(scores.softmax(-1)):
        following = model.generate(
            torch.tensor([[1, 2, 3, first]]),
            **(common | arguments | {"num_return_sequences": 1, "max_new_tokens": 1}),
            output_scores=True,
            return_dict_in_generate=True,
        )
        law[first] = prob * following.scores[0][0].softmax(-1)
    counts = torch.zeros(vocab, vocab)
    counts.index_put_((ours[:, 3], ours[:, 4]), torch.ones(num_samples), accumulate=True)
    assert (counts[law == 0] == 0).all()
    error = (counts / num_samples - law).abs()
    assert (error <= 4.5 * (law * (1 - law) / num_samples).sqrt() + 1e-9).all()


def test_the_seed_of_transformers_fixes_a_sample():
    model, callable_ = load(), speculate()
    texts = []
    for seed in (4, 4, 5):
        set_seed(seed)
        texts.append(decode(model, callable_, do_sample=True))
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


class Recorder:
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.received: list[list[int]] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.received.append(tokens.flatten().tolist())

    def end(self) -> None:
        self.received.append([])


def test_tokens_are_streamed_one_by_one():
    recorder, inputs = Recorder(), padded(1)
    ours = load().generate(
        **inputs, max_new_tokens=5, custom_generate=speculate(), token_streamer=recorder
    )
    assert recorder.received[0] == inputs["input_ids"][0].tolist()
    assert recorder.received[1:] == [[token] for token in ours[0, 8:].tolist()] + [[]]


def test_the_model_is_left_as_it_was_and_changed_weights_count():
    model, callable_ = load().requires_grad_(True).train(), speculate()
    before = model.config._attn_implementation
    decode(model, callable_)
    assert model.training
    assert model.config._attn_implementation == before
    assert all(parameter.requires_grad for parameter in model.parameters())
    engine = callable_._engine
    shared = {parameter.data_ptr() for parameter in model.parameters()}
    assert {p.data_ptr() for p in engine.target.network.parameters()} == shared
    tiny.perturb(model.eval().requires_grad_(False), 9, 0.3)
    plain, ours = both(model, padded(), callable_)
    torch.testing.assert_close(ours, plain)
    assert callable_._engine is engine


def test_an_engine_grows_with_its_inputs():
    model, callable_ = load(), speculate()
    for inputs in (padded(1), padded()):
        plain, ours = both(model, inputs, callable_)
        torch.testing.assert_close(ours, plain)
    assert callable_._engine.config.max_batch == 3


def test_a_draft_by_its_folder_is_compared_with_the_tokenizer(tmp_path):
    draft, model = load(jitter=0.02), load()
    draft.save_pretrained(tmp_path)
    tiny.backend().save_pretrained(tmp_path)
    plain, ours = both(model, padded(), speculate(tmp_path, tokenizer=tiny.backend()))
    torch.testing.assert_close(ours, plain)
    with pytest.raises(InvalidRequest, match="give it as tokenizer"):
        decode(model, speculate(tmp_path))


CASES = {
    "beam_search": {"num_beams": 2},
    "output_scores": {"output_scores": True, "return_dict_in_generate": True},
    "min_p with top_p": {"do_sample": True, "min_p": 0.1, "top_p": 0.9},
    "NoRepeatNGram": {"no_repeat_ngram_size": 3},
    "NoRepeatNGramLogitsProcessor": {
        "logits_processor": LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)])
    },
    "give temperature to generate": {
        "do_sample": True,
        "logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.5)]),
    },
    "PrefixConstrained": {"prefix_allowed_tokens_fn": lambda row, ids: [1, 2]},
    "cache is not": {"cache": DynamicCache()},
    "position_ids": {"position_ids": torch.zeros(3, 8, dtype=torch.int64)},
    "attention_mask must": {"attention_mask": torch.tensor([[1] * 7 + [0]] * 3)},
    "streamer takes one row": {"token_streamer": Recorder()},
}


@pytest.mark.parametrize("message", CASES)
def test_what_cannot_be_honoured_is_refused_by_its_name(message):
    with pytest.raises(InvalidRequest, match=message):
        decode(load(), speculate(), **CASES[message])


def test_settings_and_models_that_cannot_work_are_refused():
    with pytest.raises(InvalidRequest, match="num_speculative_tokens here"):
        speculate(k=3)
    with pytest.raises(InvalidRequest, match="max_batch follows from the inputs"):
        speculate(max_batch=3)
    model = load()
    model.model.layers[0].forward = model.model.layers[0].forward
    with pytest.raises(InvalidRequest, match=r"forward of model\.layers\.0 has been replaced"):
        decode(model, speculate())
    with pytest.raises(ForerunError, match="no-such-model"):
        decode(load(), speculate("no-such-model", tokenizer=tiny.backend()))
