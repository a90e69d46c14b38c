"""Speculative decoding within transformers: a callable for `model.generate(custom_generate=...)`.

The engine runs over the loaded model itself: its modules are copied at every call, its parameters
are shared. Whatever of a call cannot be honoured is refused by its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast
from weakref import ref

import torch
from jaxtyping import Int64
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, QuantizedCache
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from forerun.drafters.config import NONE, parse_drafter
from forerun.drafters.draft_model import DraftModel
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.loading import Source, as_sources
from forerun.errors import InvalidRequest
from forerun.models.architecture import read_architecture
from forerun.models.huggingface import (
    HuggingFaceModel,
    adapt,
    check_passes,
    prepare_network,
    sharing,
)
from forerun.models.tokenizers import FROM_TRANSFORMERS, Tokenizer, TokenizerDefinition, adopt
from forerun.sampling.config import SamplingParams

Draft = PreTrainedModel | Source | Sequence[Source] | None

PROCESSORS: Mapping[type, tuple[str, str]] = MappingProxyType(
    {
        logits_process.LogitNormalization: ("", ""),
        logits_process.RepetitionPenaltyLogitsProcessor: ("penalty", "repetition_penalty"),
        logits_process.MinLengthLogitsProcessor: ("min_length", "min_length"),
        logits_process.MinNewTokensLengthLogitsProcessor: ("min_new_tokens", "min_new_tokens"),
        logits_process.SuppressTokensLogitsProcessor: ("suppress_tokens", "suppress_tokens"),
        logits_process.TemperatureLogitsWarper: ("temperature", "temperature"),
        logits_process.TopKLogitsWarper: ("top_k", "top_k"),
        logits_process.TopPLogitsWarper: ("top_p", "top_p"),
        logits_process.MinPLogitsWarper: ("min_p", "min_p"),
    }
)
"""The logits processors that are honoured: the attribute that has the value of each, and the one
of the generation config that it comes from."""
WARPERS = ("temperature", "top_k", "top_p", "min_p")
UNREPORTED = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
CACHES = ("cache", "past_key_values")
"""Names that releases of transformers give the cache that `generate` makes."""
IGNORED = frozenset({"attention_mask", "use_cache", "logits_to_keep"})
CONTEXT_STEP = 256
"""The KV cache has room for a multiple of so many tokens, so that later calls often fit."""


def speculate(
    draft: Draft = "suffix", *, tokenizer: Any = None, **settings: Any
) -> SpeculativeGenerate:
    """Return a callable that decodes speculatively for transformers' `model.generate`.

    Greedy text in fp32 is that of `generate` without it, and sampled text has the same distribution
    (`transformers.set_seed` fixes it). Use one callable for many calls, one after another: it keeps
    the draft and what its controller has learned.

    Args:
        draft: a loaded transformers model with the target's tokens, or what `Engine.load` takes
            except "auto"; "suffix" copies from the text and needs no files.
        tokenizer: the target's, which that of a draft model is compared with; None reads it by
            `model.name_or_path`.
        settings: fields of `EngineConfig` except max_batch and max_context, which follow from the
            inputs. transformers runs the drafts too (runner="eager") unless a runner is named.

    Raises:
        InvalidRequest: a setting is unknown or cannot work.

    Example:
        model.generate(**inputs, custom_generate=speculate(num_speculative_tokens=4))
    """
    if chosen := settings.keys() & {"max_batch", "max_context"}:
        raise InvalidRequest(f"{min(chosen)} follows from the inputs of generate: leave it out")
    # KV of earlier calls is not used again: the weights may have been trained in between.
    config = EngineConfig().with_settings({"runner": "eager", **settings, "sharing": "none"})
    return SpeculativeGenerate(draft, tokenizer, config)


class SpeculativeGenerate:
    """Decodes the inputs of `model.generate`, which calls it; `speculate` makes one."""

    def __init__(self, draft: Draft, tokenizer: Any, config: EngineConfig) -> None:
        self._draft = draft
        self._tokenizer = tokenizer
        self._config = config
        self._engine: Engine | None = None
        self._model: ref[PreTrainedModel] | None = None

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Int64[Tensor, "rows length"],
        logits_processor: Iterable[Any],
        stopping_criteria: Any,
        generation_config: Any,
        token_streamer: Any = None,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | Tensor:
        """Return the inputs with new tokens behind them, padded on the right.

        Args:
            token_streamer: gets the prompt and then every token of a single row. `generate` takes
                it under this name, because it hands its `streamer` to no callable.

        Raises:
            ForerunError: the model or the draft is refused, or an argument cannot be honoured.
        """
        _check_config(generation_config, logits_processor)
        prompts, (num_rows, length) = _read_prompts(input_ids, model_kwargs), input_ids.shape
        if token_streamer is not None and num_rows > 1:
            raise InvalidRequest(f"a streamer takes one row of tokens; there are {num_rows}")
        params = _read_params(generation_config, stopping_criteria, length)
        # From the generator that transformers.set_seed sets.
        seeds = torch.empty(num_rows, dtype=torch.int64).random_(generator=torch.default_generator)
        engine = self._open_engine(model, num_rows, stopping_criteria.max_length)
        texts = input_ids.tolist()
        try:
            ids = [
                engine.add_request(prompt, replace(params, seed=seed))
                for prompt, seed in zip(prompts, seeds.tolist(), strict=True)
            ]
            if token_streamer is not None:
                token_streamer.put(input_ids.cpu())
            while engine.has_unfinished:
                for chunk in engine.step():
                    text = texts[ids.index(chunk.request_id)]
                    if _append(chunk.token_ids, text, stopping_criteria, token_streamer):
                        engine.abort(chunk.request_id)
            for request_id in ids:
                engine.abort(request_id)
        except BaseException:
            self._engine = None  # with what is left of its requests
            raise
        if token_streamer is not None:
            token_streamer.end()
        sequences = _pad(texts, generation_config, input_ids)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=cast("torch.LongTensor", sequences))
        return sequences

    def _open_engine(self, model: PreTrainedModel, num_rows: int, num_tokens: int) -> Engine:
        """Return an engine over the model as it is now, with room for its texts."""
        network = _copy_network(model)
        engine = self._engine
        if engine is not None and self._model is not None and self._model() is model:
            target = engine.target
            fits = num_rows <= engine.config.max_batch and num_tokens <= engine.max_context
            if fits and (target.device, target.dtype) == (model.device, model.dtype):
                assert isinstance(target, HuggingFaceModel)
                prepare_network(network)
                target.replace_network(network)
                return engine
        self._engine = engine = None  # frees its memory before more is taken
        check_passes(type(model), model.config)
        rounded = -(-num_tokens // CONTEXT_STEP) * CONTEXT_STEP
        sizes = read_architecture(type(model).__name__, model.config.to_dict())
        if sizes.position_limit is not None:
            rounded = max(num_tokens, min(rounded, sizes.max_positions))
        config = replace(
            self._config,
            max_batch=num_rows,
            max_context=rounded,
            max_step_rows=max(self._config.max_step_rows, num_rows * (self._config.max_chain + 1)),
        )
        target = _adapt_to(config, network)
        engine = Engine(target=target, tokenizer=self._read_tokenizer(model), config=config)
        draft, dtype = self._draft, str(model.dtype).removeprefix("torch.")
        if isinstance(draft, PreTrainedModel):
            draft_model = _adapt_to(config, _copy_network(draft))
            engine = engine.with_draft(DraftModel(draft_model, target.vocab_size))
        else:
            engine = engine.with_draft(draft, dtype=dtype)
        self._engine, self._model = engine, ref(model)
        return engine

    def _read_tokenizer(self, model: PreTrainedModel) -> Tokenizer:
        """Return the target's tokenizer, or one of no tokens if no draft is compared with it."""
        draft = NONE if isinstance(self._draft, PreTrainedModel) else self._draft or NONE
        if all(
            each == NONE or (isinstance(each, str) and parse_drafter(each))
            for each in as_sources(draft)
        ):
            return Tokenizer(
                TokenizerDefinition(
                    content=Backend(BPE()).to_str(),
                    eos_token_id=None,
                    splits_special_tokens=False,
                    chat_template=None,
                ),
                lambda _: lambda *_: "",
            )
        name, tokenizer = model.name_or_path, self._tokenizer
        try:
            return adopt(tokenizer or AutoTokenizer.from_pretrained(name, **FROM_TRANSFORMERS))
        except (OSError, ValueError) as error:
            raise InvalidRequest(
                f"the target's tokenizer is needed to compare that of {draft} with, and there is "
                f"none in {name!r}: give it as tokenizer=..."
            ) from error


def _copy_network(model: PreTrainedModel) -> PreTrainedModel:
    """Copy the modules of a model, sharing its parameters, or refuse one that is not whole."""
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1 or "meta" in devices:
        raise InvalidRequest(
            f"the weights lie on {', '.join(sorted(devices))}; load the model on one device"
        )
    for name, module in model.named_modules():
        if "forward" in vars(module):
            raise InvalidRequest(
                f"the forward of {name or type(model).__name__} has been replaced, by "
                "torch.compile or a patch, which cannot be run here: load the model without it"
            )
    return sharing(model)


def _adapt_to(config: EngineConfig, network: PreTrainedModel) -> HuggingFaceModel:
    return adapt(
        network,
        num_slots=config.num_slots,
        max_context=config.max_context,
        max_staged_rows=config.max_nodes + 1,
    )


def _check_config(config: Any, processors: Iterable[Any]) -> None:
    """Refuse what a generation config or a logits processor asks for and is not honoured."""
    mode = config.get_generation_mode().value
    if mode not in ("greedy_search", "sample"):
        raise InvalidRequest(f"{mode} is not supported: leave out what asks for it")
    for name in UNREPORTED:
        if getattr(config, name, None):
            raise InvalidRequest(f"{name} is not supported: only tokens are returned")
    if config.do_sample and config.min_p and (config.top_p or 1) < 1:
        raise InvalidRequest("min_p with top_p is not supported: leave one of them out")
    for each in processors:
        attribute, source = PROCESSORS.get(type(each), (None, ""))
        value, stated = getattr(each, attribute or "", None), getattr(config, source, None)
        value = value.tolist() if isinstance(value, Tensor) else value
        if attribute is None or value != stated:
            raise InvalidRequest(
                f"the logits processor {type(each).__name__} is not supported"
                + (f": give {source} to generate instead" if source else ": leave it out")
            )


def _read_prompts(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> list[list[int]]:
    """Return the tokens of every row without its padding, which must be on the left."""
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device).long()
    if mask.shape != input_ids.shape or not bool((mask.diff(dim=1) >= 0).all()):
        raise InvalidRequest("attention_mask must be 0 on padding left of the prompt, and else 1")
    for name, value in model_kwargs.items():
        if value is None or name in IGNORED:
            continue
        if name == "position_ids":
            is_usual = bool(((value.to(mask.device) == mask.cumsum(-1) - 1) | (mask == 0)).all())
        else:
            is_usual = name in CACHES and not getattr(value, "_is_user_defined", False)
        if not is_usual or isinstance(value, QuantizedCache):
            raise InvalidRequest(f"{name} is not supported: leave it out")
    return [row[kept.bool()].tolist() for row, kept in zip(input_ids, mask, strict=True)]


def _read_params(config: Any, criteria: Any, num_tokens: int) -> SamplingParams:
    """Return the sampling parameters of a generation config, for inputs of this width."""
    ends = [each.eos_token_id.tolist() for each in criteria if type(each) is EosTokenCriteria]
    stated = {name: getattr(config, name) for name in ("repetition_penalty", *WARPERS)}
    given = {name: value for name, value in stated.items() if value is not None}
    return SamplingParams(
        **given if config.do_sample else given | {"temperature": 0.0},
        bad_token_ids=tuple(config.suppress_tokens or ()),
        # Ids below 0 never come.
        stop_token_ids=tuple({token for tokens in ends for token in tokens if token >= 0}),
        min_tokens=max(0, (config.min_length or 0) - num_tokens) if ends else 0,
        max_tokens=criteria.max_length - num_tokens,
    )


def _append(tokens: Iterable[int], text: list[int], criteria: Iterable[Any], streamer: Any) -> bool:
    """Append tokens to a text until a criterion ends it, one that the engine does not check.

    Returns whether one did. Criteria get no scores.
    """
    others = [each for each in criteria if type(each) not in (MaxLengthCriteria, EosTokenCriteria)]
    for token in tokens:
        text.append(token)
        if streamer is not None:
            streamer.put(torch.tensor([token]))
        if any(bool(torch.as_tensor(each(torch.tensor([text]), None)).all()) for each in others):
            return True
    return False


def _pad(texts: Sequence[list[int]], config: Any, like: Tensor) -> Tensor:
    """Return texts as one tensor, padded on the right."""
    longest, pad = max(map(len, texts)), config._pad_token_tensor
    if pad is None and min(map(len, texts)) < longest:
        raise InvalidRequest("the texts end at several lengths: give pad_token_id")
    padding = [] if pad is None else [int(pad)]
    return like.new_tensor([text + padding * (longest - len(text)) for text in texts])
