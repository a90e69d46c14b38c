"""`forerun plan`: choose drafter, K and batch size, and predict their speedup."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.markup import escape
from rich.table import Column, Table
from tyro.conf import UseAppendAction, arg

from forerun.cli.command import Command
from forerun.cli.simulate import SimulationFlags, simulate_profiles
from forerun.cli.tables import SafeConsole, table_of
from forerun.drafters.config import AUTO, NONE, parse_drafter
from forerun.errors import InvalidProfile, InvalidRequest
from forerun.measure.profile import Profile, load_profiles
from forerun.plan.acceptance import Acceptance, TracedDrafts, counted, drafts_in, given
from forerun.plan.advice import DraftCandidate, PlanConfig
from forerun.theory.cost import with_draft_cost
from forerun.trace.files import read_trace

if TYPE_CHECKING:
    from forerun.plan.advice import Advice, DraftCandidate, Option
    from forerun.theory.cost import CostTable


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of `forerun plan`."""

    profile: UseAppendAction[tuple[Path, ...]] = ()
    """What `forerun profile` wrote, of one draft or several.
    It may be of another machine: the plan holds for the machine of the profile."""
    draft: UseAppendAction[tuple[str, ...]] = ()
    """Drafters to compare, by the names in profiles and trace; "none" is plain decoding.
    "auto", the default: every draft of the profiles."""
    acceptance: UseAppendAction[tuple[str, ...]] = ()
    """[DRAFT=]ALPHA, the same at every position, or [DRAFT=]BETA1,BETA2,... by position."""
    conditional: bool = False
    """Figures by position are conditional: given that everything before was accepted."""
    trace: Path | None = None
    """Take the acceptance from this trace of `forerun generate` or `forerun bench`."""
    batch: UseAppendAction[tuple[int, ...]] = ()
    """Sequences at once that are considered. Default: those of the profiles."""
    context: int | None = None
    """Committed tokens of every sequence. Default: the shortest that was profiled."""
    temperature: float | None = None
    """0 plans for greedy decoding, anything above for sampling.
    Default: that of the trace if all its requests have one, else 1."""
    max_k: Annotated[int, arg(name="num-speculative-tokens", aliases=("--max-k", "--k"))] = 16
    """Largest K that is considered."""
    slo_tpot: float | None = None
    """Most seconds per output token; the plan is the highest throughput that keeps it."""
    simulation: SimulationFlags = field(default_factory=SimulationFlags)
    json: bool = False
    """Print one JSON object."""


def candidates_of(options: PlanOptions) -> tuple[list[DraftCandidate], PlanConfig]:
    """Return every drafter that the plan compares, and the plan's operating points."""
    profiles = _read_profiles(options.profile)
    if not profiles:
        raise InvalidRequest("a plan needs costs: a --profile of `forerun profile`")
    traced = _read_traced(options)
    config = config_of(options, profiles, temperature_of(options, traced))
    _check_same_pair(profiles, traced)
    tables = {name: profile.costs.at(config.temperature) for name, profile in profiles.items()}
    named = [tuple(tables) if name == AUTO else (name,) for name in options.draft or (AUTO,)]
    names = tuple(name for each in named for name in each)
    figures = _parse_figures(options, names)
    candidates = [
        DraftCandidate(
            name=name,
            table=_find_table(name, tables, traced),
            acceptance=_find_acceptance(name, figures, traced, options, config.temperature),
        )
        for name in names
    ]
    return candidates, config


def temperature_of(options: PlanOptions, traced: TracedDrafts | None) -> float:
    """Return the temperature of the flags, or else the only one in the trace, or else 1."""
    if options.temperature is not None:
        return options.temperature
    found = set() if traced is None else set(traced.temperatures.values())
    return found.pop() if len(found) == 1 else 1.0


def config_of(
    options: PlanOptions, profiles: Mapping[str, Profile], temperature: float
) -> PlanConfig:
    """Return the operating points of the plan: from the flags, otherwise from the profile."""
    table = next(iter(profiles.values())).greedy
    return PlanConfig(
        batches=tuple(sorted(set(options.batch))) or table.batches,
        context=table.contexts[0] if options.context is None else options.context,
        temperature=temperature,
        max_k=options.max_k,
        slo_tpot_s=options.slo_tpot,
    )


def _read_profiles(paths: tuple[Path, ...]) -> dict[str, Profile]:
    """Read profiles and return them by the draft that each was measured with."""
    found: dict[str, Profile] = {}
    read = [(path, profile) for path in paths for profile in load_profiles(path)]
    for path, profile in read:
        if profile.draft in found:
            raise InvalidRequest(f"{path} is a second profile with draft {profile.draft}")
        for other in found.values():
            mine, its = (
                replace(setup, draft_hash="", draft_runner="")
                for setup in (profile.setup, other.setup)
            )
            if differences := mine.differences(its):
                raise InvalidProfile(
                    f"{path} cannot be compared with the profile of {other.draft}: "
                    f"{', '.join(differences)}"
                )
        found[profile.draft] = profile
    return found


def _read_traced(options: PlanOptions) -> TracedDrafts | None:
    if options.trace is None:
        return None
    found = drafts_in(read_trace(options.trace), str(options.trace))
    if found.num_damaged:
        logger.warning(
            "%d place(s) of the trace %s could not be read; the plan is from the rest",
            found.num_damaged,
            options.trace,
        )
    return found


def _check_same_pair(profiles: Mapping[str, Profile], traced: TracedDrafts | None) -> None:
    """Refuse acceptance that was counted with another pair of models."""
    for name, draft in ({} if traced is None else traced.drafts).items():
        header = draft.header
        for profile in profiles.values():
            setup = profile.setup
            differences = []
            if header.target_hash != setup.target_hash:
                differences.append(f"target_hash {header.target_hash} ({header.target})")
            is_other = header.draft_hash not in (None, setup.draft_hash)  # None: it has no files
            if profile.draft == name and is_other:
                differences.append(f"draft_hash {header.draft_hash} ({name})")
            if differences:
                raise InvalidProfile(
                    f"the trace was made with {' and '.join(differences)}, the profile of "
                    f"{profile.target} and {profile.draft} with target_hash {setup.target_hash} "
                    f"and draft_hash {setup.draft_hash}: acceptance holds for its own pair"
                )


def _find_table(
    name: str, tables: Mapping[str, CostTable], traced: TracedDrafts | None
) -> CostTable:
    """Return the cost table of a drafter.

    A drafter without a model is put beside the target of any profile: what it takes per token is
    in the trace, and so is the rest of a cycle. Without a trace it drafts for nothing, and the rest
    is what it is with a draft model.
    """
    if name in tables:
        return tables[name]
    beside = next(iter(tables.values()))
    if name == NONE:
        return beside
    named = parse_drafter(name)
    own = None if traced is None else traced.drafts.get(name)
    measured = None if own is None else own.draft_token_s
    if named is None or (named.name == "self" and measured is None):
        raise InvalidRequest(
            f"the cost of drafting with {name} is not known: the profiles are of "
            f"{', '.join(tables)}; profile it"
            + (", or give a trace of it" if named is not None else "")
        )
    if own is None or measured is None:
        return with_draft_cost(beside, draft_s=0.0)
    return with_draft_cost(beside, draft_s=measured, overhead_s=own.overhead_s)


def _parse_figures(options: PlanOptions, names: tuple[str, ...]) -> dict[str, list[float]]:
    """Parse the figures of --acceptance by draft."""
    if doubled := {name for name in names if names.count(name) > 1}:
        raise InvalidRequest(f"--draft {min(doubled)} is given twice")
    found: dict[str, list[float]] = {}
    for text in options.acceptance:
        name, equals, figures = text.rpartition("=")
        if not equals and len(names) > 1:
            raise InvalidRequest(
                f"--acceptance {text} could be of {', '.join(names)}; give DRAFT={text}"
            )
        name = name if equals else names[0]
        if name not in names:
            raise InvalidRequest(f"--acceptance is of {name}, the drafters are {', '.join(names)}")
        if name in found:
            raise InvalidRequest(f"--acceptance of {name} is given twice")
        found[name] = list(numbers(text, figures))
    return found


def numbers(text: str, figures: str) -> Iterator[float]:
    for part in figures.split(","):
        try:
            yield float(part)
        except ValueError:
            raise InvalidRequest(
                f"--acceptance {text}: {part!r} is no number; give 0.8, or 0.8,0.6,0.4"
            ) from None


def _find_acceptance(
    name: str,
    figures: Mapping[str, list[float]],
    traced: TracedDrafts | None,
    options: PlanOptions,
    temperature: float,
) -> Acceptance:
    if name == NONE:
        return given([0.0], conditional=False, max_k=1)
    if name in figures:
        return given(figures[name], conditional=options.conditional, max_k=options.max_k)
    if traced is not None and name in traced.drafts:
        return counted(traced.counts(name, temperature))
    if traced is not None:
        raise InvalidRequest(
            f"the trace is of {', '.join(traced.drafts)} and has no steps of {name}; give "
            f"--acceptance {name}=..., or name the --draft to plan"
        )
    raise InvalidRequest(f"the acceptance of {name} is not known: give --acceptance or --trace")


def run(options: PlanOptions) -> int:
    if options.simulation.workload is not None:
        return run_workload(options)
    if options.simulation != SimulationFlags():
        raise InvalidRequest("--controller and --seed are of a --workload: name one")
    from forerun.plan.advice import advise

    found, config = candidates_of(options)
    advice = advise(found, config)
    if options.json:
        print(json.dumps(content(advice, config, found, options)))
    else:
        _print_plan(advice, config, origin(options, found))
    return 0


def run_workload(options: PlanOptions) -> int:
    """Simulate a workload with the costs of one file of profiles."""
    plain = PlanOptions(
        profile=options.profile,
        draft=options.draft,
        simulation=options.simulation,
        json=options.json,
    )
    if options != plain:
        raise InvalidRequest(
            "with a --workload give --profile, --draft and what belongs to the workload: the other "
            "flags of a plan are fields of its file"
        )
    if len(options.profile) != 1:
        raise InvalidRequest("a --workload needs one --profile, for what cycles take")
    [path] = options.profile
    profiles = load_profiles(path)
    named = [draft for draft in options.draft if draft != AUTO]
    known = [profile.draft for profile in profiles]
    for draft in named:
        if draft not in known:
            raise InvalidRequest(
                f"--draft {draft} has no profile: there are those of {', '.join(known)}"
            )
    chosen = [profile for profile in profiles if not named or profile.draft in named]
    simulate_profiles(options.simulation, path, chosen, as_json=options.json)
    return 0


def origin(options: PlanOptions, candidates: Sequence[DraftCandidate]) -> list[str]:
    """Return lines that state the sources of costs and acceptance."""
    costs = "costs: " + ", ".join(map(str, options.profile))
    sources = (options.trace if c.acceptance.num_requests else "given" for c in candidates)
    names = (f"acceptance of {c.name}" for c in candidates)
    return [costs, *(f"{name}: {found}" for name, found in zip(names, sources, strict=True))]


def content(
    advice: Advice, config: PlanConfig, candidates: Sequence[DraftCandidate], options: PlanOptions
) -> dict[str, object]:
    return {
        "config": asdict(config),
        "origin": origin(options, candidates),
        "acceptance": {c.name: list(c.acceptance.survival) for c in candidates},
        **advice.to_dict(),
    }


COMMAND = Command(
    options=PlanOptions,
    run=run,
    lists={
        "--acceptance": "",
        **dict.fromkeys(["--draft", "--profile", "--batch", "--controller", "--controllers"], ","),
    },
    description="Which drafter, K and batch to use, what it should be worth and from where on it\n"
    "stops paying. Drafts are chains. With --workload,\n"
    "serve a workload in simulated time under several controllers, the engine's own, and compare\n"
    "latency and throughput.",
    examples=(
        "forerun plan --profile profile.json --acceptance 0.8",
        "forerun plan --profile profile.json --trace trace.jsonl --temperature 1 --batch 1 8",
        "forerun plan --profile a.json --profile b.json --draft a --draft b --draft suffix "
        "--trace bench.jsonl",
        "forerun plan --profile profile.json --acceptance 0.8,0.66,0.5 --slo-tpot 0.02 --json",
        "forerun plan --workload w.toml --profile profile.json --controller plain fixed:3 auto",
    ),
)


LEGEND = (
    "speedup: tau / kappa, decoding alone; tau: tokens per step; kappa: a step in plain steps\n"
    "even at: the accepted / drafted, the constant alpha and the cost of a drafted token\n"
    "(in plain steps) at which speculation gains nothing"
)


def _print_plan(advice: Advice, config: PlanConfig, origin: Sequence[str]) -> None:
    """Print the plan, the best options by batch size, and break-even points."""
    console = SafeConsole()
    console.print(f"[bold]{escape(sentence(advice, config))}[/]", "", soft_wrap=True, sep="\n")
    console.print(batches(advice, config), "")
    console.print(break_even(advice), "")
    for remark in advice.remarks:
        console.print(f"[yellow]{escape(remark)}[/]", soft_wrap=True)
    console.print(f"[dim]{LEGEND}[/]", soft_wrap=True)
    for line in origin:
        console.print(f"[dim]{escape(line)}[/]", soft_wrap=True)


def sentence(advice: Advice, config: PlanConfig) -> str:
    best = advice.best
    where = f"at batch {best.batch}, context {config.context}, T={config.temperature:g}"
    speed = f"{best.tokens_per_s:.4g} tokens/s, {1e3 * best.tpot_s:.3g} ms per token"
    if best.is_plain:
        return f"decode plainly {where}: {speed}; {elsewhere(advice)}"
    return (
        f"draft with {best.draft}, K={best.num_speculative_tokens}, {where}: {speed}, "
        f"{best.speedup.show()} times plain decoding"
    )


def elsewhere(advice: Advice) -> str:
    """Return a sentence on the batch size with the fastest draft, for plans of plain decoding."""
    paying = [option for option in advice.per_batch if not option.is_plain]
    if not paying:
        return "no draft pays"
    best = max(paying, key=lambda option: option.speedup.estimate)
    return (
        f"no draft pays there, but {best.draft} at K={best.num_speculative_tokens} does at batch "
        f"{best.batch}: {best.speedup.show()} times plain decoding"
    )


def batches(advice: Advice, config: PlanConfig) -> Table:
    table = table_of(Column("batch", no_wrap=True), *headings(advice))
    for option in advice.per_batch:
        late = config.slo_tpot_s is not None and option.tpot_s > config.slo_tpot_s
        table.add_row(f"{option.batch}{' (too slow)' if late else ''}", *cells(option, advice))
    return table


def headings(advice: Advice) -> tuple[str, ...]:
    if len(advice.curves) > 1:
        return ("drafter", "K", "speedup (95%)", "ms/token")
    return ("K", "tau", "kappa", "speedup (95%)", "ms/token", "tokens/s")


def break_even(advice: Advice) -> Table:
    table = table_of(
        Column("even at", overflow="fold"), "K", "accepted / drafted", "alpha", "draft cost"
    )
    for name, found in advice.break_even:
        alpha, rate = found.acceptance_probability, found.draft_acceptance_rate
        table.add_row(
            escape(name),
            str(found.num_speculative_tokens),
            f"{rate:.3f}" if rate <= 1 else f"{rate:.3f} (never)",
            "never" if alpha is None else f"{alpha:.3f}",
            f"{found.draft_cost:.3f}" if found.draft_cost >= 0 else "never",
        )
    return table


def cells(option: Option, advice: Advice) -> tuple[str, ...]:
    """Return the cells of an option except its batch size, in the order of `headings`."""
    k = "plain" if option.is_plain else str(option.num_speculative_tokens)
    speedup = "1" if option.is_plain else option.speedup.show()
    latency = f"{1e3 * option.tpot_s:.3g}"
    if len(advice.curves) > 1:
        return escape(short(option.draft, advice)), k, speedup, latency
    tau, kappa = option.acceptance_length.estimate, option.cycle_cost.estimate
    return k, f"{tau:.2f}", f"{kappa:.2f}", speedup, latency, f"{option.tokens_per_s:.4g}"


def short(name: str | None, advice: Advice) -> str:
    """Return the last part of a drafter's path if it is unique, else the whole path."""
    if name is None:
        return ""
    last = [Path(other).name for other, _ in advice.curves]
    return Path(name).name if last.count(Path(name).name) == 1 else name
