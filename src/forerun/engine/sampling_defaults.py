"""Sampling parameters that a model states for requests that leave them out, as vLLM reads them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from forerun.errors import InvalidModel, InvalidRequest
from forerun.models.checkpoint import ModelFiles
from forerun.sampling.config import MIN_TEMPERATURE, RANGES

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


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
        if limits.name not in NAMES or value is None:
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
