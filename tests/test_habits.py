"""Habits of the sources that can be counted. `habits.json` has the ceilings, which only shrink.

What has come since the merge base with `main` is compared with it: more lines of Python in `src`
need a trailer `Pays-for:` in a commit message that names what went for them.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "forerun"
CEILINGS = ROOT / "tests" / "habits.json"
TRAILER = "Pays-for"
MAIN = ("main", "origin/main")

REMOVED = """
align/chunked align/data align/draft align/loss align/manifest align/methods/passes align/objectives
align/optimiser align/report align/responses align/selection align/serving align/target_cache
align/teachers align/training audit bounded_documents cli/bench_endpoints cli/plan_inputs
control/exploration control/safety
diagnose drafters/eagle3/formats drafters/eagle3/gate drafters/medusa_head
drafters/suffix_automaton engine/core engine/endpoint measure/judge measure/judged measure/profile
models/tabular models/token_text native/compiler plan/simulation probe sampling/tree_residuals
server/grammar server/keys testing/exact theory/cost_line trace/explained trace/schema
trace/summary cli/trace
""".split()
"""Packages and large modules of earlier versions whose work another place does now.

A module may have the name of a package that is gone: `align/teachers.py` is one module.
"""
MERGED = frozenset(
    "align/objectives align/teachers measure/judge measure/profile plan/simulation".split()
)
"""Packages that became one module."""

# A first word that is an adjective, a participle or a noun alone is no verb; `is`, `has`, `may`,
# `to`, `from` and `as` begin questions and conversions.
VERBS = frozenset(
    """
    abort absorb accept add admit adopt adapt advance advise align allocate announce answer append
    apply arrange as ask assign attach attempt attend attribute await backward begin bet bind bound
    build call cancel cast catch charge chat check choose claim clamp clean clear clone close
    collect combine commit compare compile compute configure confirm connect consider consume
    continue convert copy count create cut deal decide decode defer dequantise derive describe
    detect detokenize diagnose digest divide download drain draw draft drop embed emit enable encode
    end enlist enqueue ensure enter estimate evaluate examine expand explain export extend extract
    fail feed fetch fill filter finalise find finish fit flatten flush follow forecast forget fork
    format forward free from fuse gather generate get give group guess grow handle has hash hide
    identify ignore import include insert install interpolate invalidate is iterate join judge keep
    launch lay learn leave limit link list load locate lock log look lookup lower make map mark mask
    match may measure merge mix move must needs normalise note notice notify observe open optimise
    order pack pad pair parse pass pause penalise pick place plan plot pool post predict preempt
    prefer prepare print probe propose protect prune pull push put quantise quiz quote race raise
    rank read rebuild receive recommend record refer refresh refuse register reject release reload
    remove rename render renew reorder repeat replace replay report request require requantise
    rescale reserve reset reshape resolve respond restart restore restrict resume retry return
    reverse rotate round route run sample save say scale scan schedule score search select send
    serve set share show shift shuffle simulate skip solve sort speculate spell spend split spread
    stage start state step stop store stream strip submit sum summarise supervise swap sync take
    test tie time to tokenize trace track train translate transpose trim try undo unpack unroll
    update upgrade use validate verify visit wait wake walk warm warn warp watch weaken weigh widen
    wrap write yield zero delete enforce promote roll settle
    """.split()
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def run_git(*arguments: str) -> str | None:
    """Return what git prints, or None where there is no git, no repository or no such commit."""
    try:
        run = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
    except FileNotFoundError:
        return None
    return run.stdout if run.returncode == 0 else None


@pytest.fixture(scope="module")
def base() -> str:
    """The commit that this tree is compared with: of `main` itself, the one before."""
    mains = [ref for ref in MAIN if run_git("rev-parse", "--verify", "-q", f"{ref}^{{commit}}")]
    found = (run_git("merge-base", "HEAD", *mains) or "").strip() if mains else ""
    if found and found == (run_git("rev-parse", "HEAD") or "").strip():
        found = (run_git("rev-parse", "--verify", "-q", "HEAD^1") or "").strip()
    if not found:
        pytest.skip("no earlier commit of main to compare with: not a clone with its history")
    return found


def count_lines_since(base: str) -> int | None:
    """Return the growth of the Python in `src` since a commit, the working tree included."""
    changes = run_git("diff", "--numstat", base, "--", "src/*.py")
    untracked = run_git("ls-files", "--others", "--exclude-standard", "--", "src/*.py")
    if changes is None or untracked is None:
        return None
    grown = [line.split("\t")[:2] for line in changes.splitlines()]
    new = [len((ROOT / name).read_text().splitlines()) for name in untracked.splitlines()]
    return sum(int(added) - int(removed) for added, removed in grown) + sum(new)


def test_more_lines_name_what_went_for_them(base: str) -> None:
    growth = count_lines_since(base)
    if growth is None:
        pytest.skip(f"{base} cannot be compared with: the clone is shallow")
    paid = run_git("log", f"--format=%(trailers:key={TRAILER},valueonly)", f"{base}..HEAD")
    assert growth <= 0 or (paid or "").strip(), (
        f"src has {growth} lines more than {base[:10]}: name what went for them in a trailer "
        f"`{TRAILER}: ...` of a commit message"
    )


def test_ceilings_only_shrink(base: str) -> None:
    before = json.loads(run_git("show", f"{base}:{CEILINGS.relative_to(ROOT)}") or "{}")
    now = json.loads(CEILINGS.read_text())
    assert before.keys() <= now.keys()
    assert not {name: now[name] for name in before if now[name] > before[name]}


def parsed() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE), ast.parse(path.read_text())


def functions_in(tree: ast.AST) -> Iterator[Function]:
    """Functions and methods, without properties and methods that Python calls by their names."""
    for node in ast.walk(tree):
        if isinstance(node, Function) and not re.fullmatch(r"__\w+__", node.name):
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            if not re.search(r"property|\.setter", decorators):
                yield node


def names_in(tree: ast.AST) -> set[str]:
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return names | {alias.name for node in imports for alias in node.names}


def called(node: ast.AST) -> str:
    """Return the name of what a call calls, and nothing for other nodes."""
    function = node.func if isinstance(node, ast.Call) else node
    if function is node:
        return ""
    return getattr(function, "attr", getattr(function, "id", ""))


def begins_with_a_verb(name: str) -> bool:
    return name.strip("_").split("_")[0] in VERBS


def counted() -> dict[str, list[str]]:
    """What each ceiling counts."""
    trees = list(parsed())
    public = [
        (path, node.name)
        for path, tree in trees
        for node in tree.body
        if isinstance(node, Function) and not node.name.startswith("_")
    ]
    times = Counter(name for _, name in public)
    return {
        "files that call model_folder": [
            str(path) for path, tree in trees if "model_folder" in {*map(called, ast.walk(tree))}
        ],
        "files that name AlignConfig": [
            str(path) for path, tree in trees if "AlignConfig" in names_in(tree)
        ],
        "function names that begin with no verb": [
            f"{path}: {node.name}"
            for path, tree in trees
            for node in functions_in(tree)
            if not begins_with_a_verb(node.name)
        ],
        "public functions named as one of another module": [
            f"{path}: {name}" for path, name in public if times[name] > 1
        ],
    }


def test_what_is_counted_stays_below_its_ceiling() -> None:
    found = counted()
    ceilings = json.loads(CEILINGS.read_text())
    assert found.keys() <= ceilings.keys()
    over = {name for name in found if len(found[name]) > ceilings[name]}
    changed = (run_git("diff", "--name-only", "main") or "").splitlines()
    places = [
        place
        for name in over
        for place in found[name]
        if not changed or f"src/forerun/{place.split(':')[0]}" in changed
    ]
    assert not over, "rename, merge or move; in files that differ from main:\n" + "\n".join(places)


@pytest.mark.parametrize("name", REMOVED)
def test_removed_paths_stay_removed(name: str) -> None:
    place = PACKAGE / name
    assert not [*place.rglob("*.py")]
    assert name in MERGED or not place.with_suffix(".py").exists()


def test_pages_link_to_what_exists() -> None:
    pages = (run_git("ls-files", "*.md") or "").splitlines()
    if not pages:
        pytest.skip("not a repository of git")
    broken = [
        f"{page}: {link}"
        for page in pages
        for link in re.findall(r"\]\(([^)#:\s]+)[)#]", (ROOT / page).read_text())
        if not (ROOT / page).parent.joinpath(link).exists()
    ]
    assert not broken


def test_a_function_begins_with_a_verb() -> None:
    source = """
    class Reader:
        @property
        def length(self): ...
        def __len__(self): ...
        def _held(self): ...
    def read_rows(): ...
    def rows_of(): ...
    """
    named = [node.name for node in functions_in(ast.parse(f"if 1:{source}"))]
    assert {name for name in named if not begins_with_a_verb(name)} == {"_held", "rows_of"}
