"""Multi-token-prediction (MTP) modules in released checkpoints: how their tensors are named."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from forerun.errors import InvalidModel
from forerun.models.checkpoint import ModelFiles

COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Settings that announce how many modules the checkpoint has; some families have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Names of the tensors of a module, as one family of checkpoints has them.

    Attributes:
        prefix: what the names begin with, up to the number of the module if it has one.
        pattern: of the names of layers; its group is the number of the module.
        layer: what the names of the layer begin with, after the prefix and the number.
        own: tensors beside the layer: our name by theirs.
        ignored: copies of the target's matrices, which the module shares with it.
        is_numbered: modules are numbered as further layers of the target.
        hidden_first: the projection reads [hidden; embedding] rather than [embedding; hidden].
    """

    prefix: str
    pattern: str
    own: Mapping[str, str]
    layer: str = ""
    ignored: tuple[str, ...] = ()
    is_numbered: bool = False
    hidden_first: bool = False


def _list_names(embedding: str, hidden: str, projection: str, norm: str) -> Mapping[str, str]:
    theirs = (embedding, hidden, projection, norm)
    ours = ("embedding_norm", "hidden_norm", "projection", "decoder.norm")
    pairs = zip(theirs, ours, strict=True)
    return MappingProxyType({f"{name}.weight": f"{own}.weight" for name, own in pairs})


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "Qwen3-Next and Qwen3.5": Layout(
            prefix="model.mtp.",
            pattern=r"model\.mtp\.layers\.(\d{1,9})\.",
            layer="layers.0.",
            own=_list_names("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        ),
        "MiMo": Layout(
            prefix="model.mtp_layers.",
            pattern=r"model\.mtp_layers\.(\d{1,9})\.",
            own=_list_names("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
            hidden_first=True,
        ),
        "GLM-4.5 and DeepSeek-V3": Layout(
            prefix="model.layers.",
            pattern=r"model\.layers\.(\d{1,9})\.",
            own=_list_names("enorm", "hnorm", "eh_proj", "shared_head.norm"),
            ignored=("embed_tokens.weight", "shared_head.head.weight"),
            is_numbered=True,
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModule:
    """The first MTP module of a checkpoint.

    Attributes:
        family: key of its layout in `LAYOUTS`.
        prefix: what the names of its tensors begin with.
        num_modules: how many the checkpoint has; only the first is used.
    """

    family: str
    prefix: str
    num_modules: int

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.family]


def find_module(files: ModelFiles) -> FoundModule | None:
    """Return the first MTP module of a checkpoint; None where it has none.

    Raises InvalidModel where its configuration says that it has none.
    """
    if files.weights.is_packed:
        return None
    found = _find_first(tuple(files.weights.names), _read_settings(files).get("num_hidden_layers"))
    if found is not None and count_announced(files) == 0:
        raise InvalidModel(
            f"{files.folder} holds an MTP module ({found.prefix}*), but its config.json says "
            "that there are 0: correct the number, or choose another draft"
        )
    return found


def open_module(source: str) -> tuple[ModelFiles, FoundModule]:
    """Open a model by its name and return it with its first MTP module.

    Raises:
        InvalidModel: there is no such model, or it has no module.
    """
    if not source:
        raise InvalidModel(
            'the drafter "mtp" is read from the files of the target: give the target by its folder '
            'or name, or name the folder in the draft, as in "mtp:path/to/model"'
        )
    files = ModelFiles.open(source)
    found = find_module(files)
    if found is None:
        count = count_announced(files)
        although = f", although its config.json announces {count}" if count else ""
        raise InvalidModel(
            f"{files.folder} brings no multi-token-prediction (MTP) module{although}: it has no "
            f"tensors like those of {', '.join(LAYOUTS)}; choose another draft (suffix, "
            "recycling, self:int4, self:N or a model)"
        )
    return files, found


def count_announced(files: ModelFiles) -> object:
    """Return the number of MTP modules in config.json; None where it names none."""
    settings = _read_settings(files)
    return next((settings[name] for name in COUNTS if settings.get(name) is not None), None)


def _read_settings(files: ModelFiles) -> Mapping[str, Any]:
    settings = dict(files.config)
    text = settings.get("text_config")
    return settings | text if isinstance(text, dict) else settings


def _find_first(names: tuple[str, ...], num_layers: object) -> FoundModule | None:
    for family, layout in LAYOUTS.items():
        matches = [found for name in names if (found := re.match(layout.pattern, name))]
        numbers = {int(found[1]) for found in matches}
        first = num_layers if layout.is_numbered and isinstance(num_layers, int) else 0
        later = {number for number in numbers if number >= first}
        prefix = layout.prefix + (f"{first}." if layout.layer == "" else "")
        if any(prefix + own in names for own in layout.own):
            return FoundModule(family=family, prefix=prefix, num_modules=max(1, len(later)))
    return None
