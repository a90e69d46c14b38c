"""The public names: every one can be had, and none of them is loaded before it is used."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import typing
from collections.abc import Iterator

import pytest

import forerun
from forerun import extend

PUBLIC = [(module, name) for module in (forerun, extend) for name in module.__all__]


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_a_public_name_can_be_had(module, name):
    assert getattr(module, name) is not None
    assert name in dir(module)


def types_in(annotation: object) -> Iterator[type]:
    """The classes of forerun that an annotation names."""
    for part in typing.get_args(annotation):
        yield from types_in(part)
    if isinstance(annotation, type) and annotation.__module__.startswith("forerun."):
        yield annotation


@pytest.mark.parametrize("protocol", ["Drafter", "Controller", "StepObserver"])
def test_types_that_an_implementation_takes_or_returns_are_public(protocol):
    found: set[type] = set()
    new = [getattr(extend, protocol)]
    for method in vars(new[0]).values():
        hints = typing.get_type_hints(method) if callable(method) else {}
        found |= {kind for hint in hints.values() for kind in types_in(hint)}
    for kind in tuple(found):
        if dataclasses.is_dataclass(kind) and kind.__name__ != "ScheduledSequence":
            hints = typing.get_type_hints(kind)
            found |= {t for f in dataclasses.fields(kind) for t in types_in(hints[f.name])}
    public = {name for module in (forerun, extend) for name in module.__all__}
    assert len(found) >= 2
    assert {kind.__name__ for kind in found} <= public


def test_a_name_that_does_not_exist_is_refused():
    with pytest.raises(AttributeError, match="has no attribute 'Engin'"):
        forerun.Engin  # noqa: B018 (the access itself is tested)


def test_the_package_is_imported_without_torch():
    code = (
        "import sys; from forerun import SamplingParams, EngineConfig, ForerunError, Tree, errors; "
        "from forerun.extend import Plan, Chain, Controller, StepRecord; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
