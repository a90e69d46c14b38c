"""Loads target and draft for an engine, and checks that they are compatible."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from forerun.control.base import Controller, Tree
from forerun.control.costs import CostSource, DrafterTraits
from forerun.control.goodput import GoodputController
from forerun.control.named import FixedController
from forerun.drafters.base import Drafter
from forerun.drafters.config import parse_drafter
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.foreign import foreign_drafter
from forerun.drafters.registry import (
    SeveralDrafters,
    build_drafter,
    check_named,
    find_checkpoint,
    named_by_method,
    tree_methods,
)
from forerun.engine.config import EngineConfig
from forerun.errors import (
    ForerunError,
    InvalidModel,
    InvalidRequest,
    UnsupportedFeatures,
)
from forerun.models.architecture import WeightFormat
from forerun.models.base import LanguageModel
from forerun.models.checkpoint import ModelFiles
from forerun.models.draft_card import staleness
from forerun.models.load import load_model
from forerun.models.tokenizers import Tokenizer, compare_vocabularies
from forerun.sampling.config import MIN_TEMPERATURE, RANGES

logger = logging.getLogger("forerun.loading")

Loaded = tuple[LanguageModel, Tokenizer]
Source: TypeAlias = str | Path | ModelFiles
"""What `ModelFiles.open` takes."""


def as_sources(drafts: Source | Sequence[Source] | int) -> Sequence[Source]:
    if isinstance(drafts, Sequence) and not isinstance(drafts, str):
        return drafts
    if isinstance(drafts, int):
        raise InvalidRequest(
            f"draft is {drafts!r}; give the name of a draft; how many tokens a step drafts is "
            "num_speculative_tokens"
        )
    return [drafts]


def load_target(
    source: Source, *, dtype: str, device: str, config: EngineConfig
) -> tuple[LanguageModel, Tokenizer, frozenset[int]]:
    """Load a target, with its tokenizer and end-of-text token ids."""
    files = ModelFiles.open(source)
    model, own = load_pair_member(
        files, dtype=dtype, device=device, config=config, weights=config.weights
    )
    return model, own, files.eos_token_ids(own)


def check_room(name: object, model: LanguageModel, config: EngineConfig) -> None:
    """Refuse a K that does not fit into the model's context."""
    if config.max_chain >= model.max_context:
        what = "num_speculative_tokens" if config.tree is None else "the number of nodes of a tree"
        raise InvalidRequest(
            f"{what} is {config.max_chain}, but the context of {name} holds {model.max_context} "
            "tokens; choose a smaller one"
        )


def load_pair_member(
    source: str | Path | ModelFiles,
    *,
    dtype: str,
    device: str,
    config: EngineConfig,
    weights: WeightFormat = "auto",
) -> Loaded:
    """Load a model with its tokenizer and a KV store for the configured batch and staged rows."""
    files = ModelFiles.open(source)
    model = load_model(
        files,
        dtype=dtype,
        device=device,
        max_batch=config.num_slots,
        max_context=config.max_context,
        max_staged_rows=config.max_nodes + 1,
        runner=config.runner,
        num_threads=config.num_threads,
        weights=weights,
    )
    check_room(files.name, model, config)
    return model, files.tokenizer


def load_drafter(
    draft: Source,
    target: LanguageModel,
    tokenizer: Tokenizer,
    *,
    dtype: str,
    config: EngineConfig,
) -> Drafter:
    """Load a drafter by its name, by its checkpoint's type, or as a draft model.

    A folder that is called like a drafter can be given as a Path, or with "./" in front.

    Raises:
        InvalidModel: the draft model is missing, damaged or of an unsupported kind.
        IncompatibleDraft: the tokens of its tokenizer cannot be matched with those of the target.
        InvalidRequest: a drafter's argument cannot be honoured.
    """
    named = parse_drafter(draft) if isinstance(draft, str) else None
    if named is not None:
        return build_drafter(named, target)
    files = ModelFiles.find(draft)
    if (load := find_checkpoint(files.config)) is not None:
        return load(files.folder, target)
    model, own = load_pair_member(
        files,
        dtype=dtype,
        device=str(target.device),
        config=config,
        weights=config.draft_weights,
    )
    if _reads_as_much(model, target):
        logger.warning(
            "a pass of the draft reads as many weights as one of the target (%d parameters, %d): "
            "drafting will cost more than it saves",
            model.num_parameters,
            target.num_parameters,
        )
    if compare_vocabularies(tokenizer, own).identical:
        return DraftModel(model, vocab_size=target.vocab_size)
    return foreign_drafter(model, own, tokenizer, target.vocab_size)


def load_drafters(
    drafts: Sequence[Source],
    target: LanguageModel,
    tokenizer: Tokenizer,
    *,
    dtype: str,
    config: EngineConfig,
    optional: Collection[Source] = (),
) -> Drafter:
    """Load one drafter per name and combine them into one drafter that plans choose from.

    Args:
        optional: drafts that are left out with a warning if they cannot be loaded.
    """
    if not drafts:
        raise InvalidRequest("the list of drafts is empty; name one, or None for plain decoding")
    loaded: list[Drafter] = []
    for draft in drafts:
        try:
            loaded.append(load_drafter(draft, target, tokenizer, dtype=dtype, config=config))
        except (ForerunError, OSError) as error:
            if draft not in optional:
                raise
            logger.warning("decoding goes on without the draft %s: %s", draft, error)
    return loaded[0] if len(loaded) == 1 else SeveralDrafters(named_by_method(loaded))


def check_choice(
    drafts: Sequence[Source], config: EngineConfig, controller: Controller | None
) -> None:
    """Refuse several drafts of which the configured controller would use only the first."""
    is_fixed = config.tree is not None or config.controller == "fixed"
    if controller is None and is_fixed and len(drafts) > 1 and config.max_nodes:
        raise InvalidRequest(
            f"several drafts ({', '.join(map(str, drafts))}) need a controller that chooses "
            "between them, and a fixed K or tree takes the first; use "
            'EngineConfig(controller="auto") without a tree'
        )


def _reads_as_much(draft: LanguageModel, target: LanguageModel) -> bool:
    """Whether a pass of a draft reads as many bytes of weights, which are most of its cost."""
    if draft.bytes_read is not None and target.bytes_read is not None:
        return draft.bytes_read >= target.bytes_read
    return draft.num_parameters >= target.num_parameters


def check_features(layers: tuple[int, ...], target: LanguageModel) -> None:
    """Refuse a drafter that reads layers beyond those of the target."""
    for layer in layers:
        if not 0 <= layer <= target.num_layers:
            raise UnsupportedFeatures(
                f"the drafter reads the input of layer {layer}; the target has layers 0 to "
                f"{target.num_layers}, the last of which stands for what leaves it: use a draft "
                "that was trained for this target"
            )


def default_controller(
    config: EngineConfig,
    drafter: Drafter | None,
    costs: Mapping[str, CostSource],
    target: LanguageModel | None = None,
) -> Controller:
    """Build the controller that the settings select; without a drafter it plans plain steps.

    Args:
        costs: by the drafters' methods, where they are known.
        target: from whose bytes the first guess at the cost of a self-draft is made.

    Raises:
        InvalidRequest: it needs costs that are not given, or a tree is wanted of a drafter that
            proposes chains only.
    """
    k = config.num_speculative_tokens
    if drafter is None or config.max_nodes == 0:
        return FixedController(0)
    if config.tree is not None:
        return FixedController(config.tree, tree_method(drafter, config.tree))
    if config.controller == "fixed":
        return FixedController(k, drafter.method)
    drafters = drafter.by_method()
    return GoodputController(
        {method: costs.get(method) for method in drafters},
        k,
        tree_methods=tree_methods(drafter),
        max_tree_nodes=config.max_nodes,
        traits={
            method: DrafterTraits(
                level_cost=None if target is None else draft.level_cost(target),
                reads_text=draft.reads_text,
            )
            for method, draft in drafters.items()
        },
    )


def tree_method(drafter: Drafter, tree: Tree) -> str:
    """Return the method of tree plans, that of the first drafter.

    Raises InvalidRequest where it proposes chains only.
    """
    if drafter.method not in tree_methods(drafter):
        raise InvalidRequest(
            f"the drafter {drafter.method} proposes chains only, so it cannot draft the tree "
            f"{tree}; leave the tree out or use another draft"
        )
    return drafter.method


def check_draft(draft: Source, target: Source) -> Source:
    """Check a draft's name and files before any weights are read, and return it with its files.

    The text is exact whatever the draft, so there is only a warning where its card names a target
    that has changed. Drafters without a model have no card.

    Raises:
        InvalidModel: there is no such model, or its files cannot be used.
        InvalidRequest: a drafter's argument cannot be honoured.
    """
    files = ModelFiles.open(target)
    if isinstance(draft, str) and (named := parse_drafter(draft)) is not None:
        check_named(named, files.sizes.num_layers)
        return draft
    found = ModelFiles.find(draft)
    if find_checkpoint(found.config) is None:
        _ = ModelFiles.open(found).sizes
    try:
        changed = staleness(found.folder, files)
    except InvalidModel as error:
        changed = f"the draft's card is of no use: {error}"
    if changed is not None:
        logger.warning("%s", changed)
    return found


STATED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling parameters that a model may state for requests that leave them out, as in vLLM."""


def sampling_defaults(files: ModelFiles) -> dict[str, float]:
    """Return the sampling parameters that a model states in generation_config.json or in its GGUF.

    Raises InvalidModel where a value is of another type or out of range.
    """
    where = str(files.generation_path)
    return parse_defaults(files.generation_config, where, files.generation_names)


def parse_defaults(
    stated: Mapping[str, object], where: str, keys: Mapping[str, str] = MappingProxyType({})
) -> dict[str, float]:
    """Return the stated fields that are sampling parameters; null is ignored.

    A temperature too small to divide by is greedy, and so is `do_sample: false`, as in
    transformers (vLLM ignores it); a file without `do_sample` samples, as in vLLM. Whole numbers
    may be written as 50.0.

    Args:
        where: name of the file, for errors.
        keys: what the file calls the fields, for errors; by default as they are called here.
    """
    found: dict[str, float] = {}
    samples = stated.get("do_sample")
    if samples is not None and type(samples) is not bool:
        raise InvalidModel(f"{where} has do_sample={samples!r:.60}; it must be true or false")
    for limits in RANGES:
        value = stated.get(limits.name)
        if limits.name not in STATED or value is None:
            continue
        if limits.integer and isinstance(value, float) and value.is_integer():
            value = int(value)
        try:
            limits.check(value)
        except InvalidRequest:
            name = keys.get(limits.name, limits.name)
            raise InvalidModel(
                f"{where} has {name}={value!r:.60}; it must be {limits}: correct it or remove it"
            ) from None
        assert isinstance(value, int | float)
        is_tiny = limits.name == "temperature" and value < MIN_TEMPERATURE
        found[limits.name] = 0.0 if is_tiny else value
    return found if samples is not False else found | {"temperature": 0.0}
