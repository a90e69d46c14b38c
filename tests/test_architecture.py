"""Rules of the code base that a linter has no word for."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGE = Path(__file__).parents[1] / "src" / "forerun"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_FUNCTION_LINES = 60
MEANINGLESS_NAMES = frozenset({"utils", "util", "helpers", "helper", "common", "misc"})
TORCH_FREE = (
    "forerun",
    "forerun.control.base",
    "forerun.doctor.diagnosis",
    "forerun.doctor.readers.trace",
    "forerun.doctor.words",
    "forerun.engine.config",
    "forerun.plan.advice",
    "forerun.plan.simulation",
    "forerun.measure.profile",
    "forerun.sampling.config",
    "forerun.trace.files",
    "forerun.trace.cycles",
    "forerun.vllm_plugin.endpoint",
    "forerun.vllm_plugin.observer",
)


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def package_of(path: Path) -> str:
    inside = path.relative_to(PACKAGE).parts
    return inside[0] if len(inside) > 1 else "."


def imported_from_other_packages() -> set[tuple[Path, str]]:
    found = set()
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("forerun."):
                source = PACKAGE.joinpath(*node.module.split(".")[1:]).with_suffix(".py")
                if source.exists() and package_of(source) != package_of(path):
                    found |= {(source, alias.name) for alias in node.names}
    return found


def test_what_other_packages_use_has_a_docstring() -> None:
    used = imported_from_other_packages()
    missing = [
        f"{name_of(path)}: {node.name}"
        for path in MODULES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and (path, node.name) in used
        and not ast.get_docstring(node)
    ]
    assert not missing


def test_functions_are_short() -> None:
    long = {
        f"{name_of(path)}: {function.name}": lines
        for path in MODULES
        for function in functions(path)
        if (lines := (function.end_lineno or 0) - function.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert not long


NETWORK = {
    *("aiohttp", "http", "httpcore", "httpcore2", "httpx", "httpx2"),
    *("requests", "urllib3", "websockets"),
}


@cache
def imported_modules(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def test_the_client_is_the_one_door_to_the_network() -> None:
    """Also for types: what others need of httpx, `client/door.py` names."""
    using = {
        name_of(path)
        for path in MODULES
        for module in imported_modules(path)
        if module.split(".")[0] in NETWORK or module == "urllib.request"
    }
    assert using == {"client/door.py"}


def installed_with(distributions: set[str]) -> set[str]:
    """Return the distributions and all that they require, without extras."""
    found: set[str] = set()
    while distributions:
        found |= distributions
        needed = set()
        for name in distributions:
            try:
                needed |= set(metadata.requires(name) or ())
            except metadata.PackageNotFoundError:
                continue  # of another platform
        required = [Requirement(line) for line in needed if "extra ==" not in line]
        distributions = {canonicalize_name(need.name) for need in required} - found
    return found


def test_every_imported_package_comes_with_a_declared_dependency() -> None:
    """What another package brings in one version, it may drop in the next."""
    project = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = chain(project["dependencies"], *(extras[name] for name in extras if name != "dev"))
    declared = {canonicalize_name(Requirement(line).name) for line in lines} - {"forerun"}
    provided = installed_with(declared)
    owners = metadata.packages_distributions()
    imported = {m.split(".")[0] for path in MODULES for m in imported_modules(path)}
    missing = {
        module
        for module in imported & owners.keys() - {"forerun"}
        if not {canonicalize_name(owner) for owner in owners[module]} & provided
    }
    assert not missing


def defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    return [target.id for target in targets if isinstance(target, ast.Name)]


def test_names_of_a_module_are_defined_once() -> None:
    for path in MODULES:
        names = [name for node in ast.parse(path.read_text()).body for name in defined(node)]
        twice = sorted(name for name in set(names) if names.count(name) > 1)
        assert not twice, name_of(path)


def test_names_say_something() -> None:
    parts = {part for path in MODULES for part in path.relative_to(PACKAGE).with_suffix("").parts}
    assert not MEANINGLESS_NAMES & parts


def test_what_came_from_a_paper_is_where_the_page_says() -> None:
    page = (PACKAGE.parents[1] / "docs" / "papers.md").read_text()
    named = re.findall(r"`([a-z_]+\.[A-Za-z_.]+)`", page)
    assert "theory.acceptance.AcceptanceCounts.survival" in named
    for name in named:
        resolve_name(f"forerun.{name}")  # raises where there is no such thing


@cache
def names_in(source: Path) -> set[str]:
    """Names that a module of the package, or a package, defines or imports at its top level."""
    if source.is_dir():
        return {path.stem for path in source.iterdir()}
    tree = ast.parse(source.with_suffix(".py").read_text())
    imported = [n for n in tree.body if isinstance(n, ast.ImportFrom | ast.Import)]
    return {
        name for node in ast.walk(tree) if isinstance(node, ast.stmt) for name in defined(node)
    } | {alias.asname or alias.name for node in imported for alias in node.names}


def stale_imports(script: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("forerun."):
            source = PACKAGE.joinpath(*node.module.split(".")[1:])
            exists = source.is_dir() or source.with_suffix(".py").exists()
            names = names_in(source) if exists else set()
            yield from (f"{node.module}.{a.name}" for a in node.names if a.name not in names)


def test_scripts_import_what_exists(tmp_path) -> None:
    """Benchmarks and recipes, without running them."""
    root = PACKAGE.parents[1]
    scripts = [path for name in ("benchmarks", "recipes") for path in (root / name).rglob("*.py")]
    assert len(scripts) > 50
    found = {name for script in scripts for name in stale_imports(script)}
    assert not found
    script = tmp_path / "script.py"
    script.write_text("from forerun.trace.files import open_trace, NO_SUCH_NAME")
    assert [*stale_imports(script)] == ["forerun.trace.files.NO_SUCH_NAME"]


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    return set(run.stdout.split())


@pytest.mark.parametrize("module", TORCH_FREE)
def test_import_loads_no_torch(module: str) -> None:
    loaded = modules_after(f"import {module}")
    assert module in loaded
    assert "torch" not in loaded


def test_public_api_is_reachable() -> None:
    import forerun

    assert all(getattr(forerun, name) is not None for name in forerun.__all__)


def test_unknown_public_name_is_an_attribute_error() -> None:
    import forerun

    with pytest.raises(AttributeError, match="no_such_name"):
        _ = forerun.no_such_name


def test_package_initialisers_are_empty_or_lazy() -> None:
    """Importing a package must not import its modules."""
    eager = {
        name_of(path)
        for path in MODULES
        if path.name == "__init__.py"
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom) and "forerun" in ast.unparse(node)
    }
    assert not eager
