"""What to look at next: every test, what it costs in minutes, and which facts it yields."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import sqrt

from forerun.diagnose.causes.base import Cause
from forerun.diagnose.evidence import Evidence

__all__ = ["EXPERIMENTS", "Experiment", "best_experiment", "experiment_for"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One thing to do.

    Attributes:
        name: short.
        how: what to do, in one sentence.
        minutes: what it takes a person who has the machine; an order of magnitude.
        yields: facts known afterwards.
    """

    name: str
    how: str
    minutes: float
    yields: tuple[str, ...]


def experiment(name: str, minutes: float, how: str, *yields: str) -> Experiment:
    """In one line."""
    return Experiment(name=name, how=how, minutes=minutes, yields=yields)


EXPERIMENTS: tuple[Experiment, ...] = (
    experiment(
        "counters",
        2,
        "read the engine's counters of drafts, drafted and accepted tokens, per position if it has "
        "them (its log, or /metrics twice)",
        *("drafts_absent", "acceptance_low", "acceptance_zero", "acceptance_fine", "alpha_1", "k"),
        *("later_over_first", "length_over_ceiling", "draft_acceptance_rate"),
    ),
    experiment(
        "start-up log",
        1,
        "search the start-up log for a refusal, missing tensors, and vocabulary sizes",
        *("speculation_refused", "weights_incomplete", "vocabularies_differ", "draft_nan"),
    ),
    experiment(
        "plain rate",
        5,
        "run the same prompts with speculation off: --tokens-per-s and --tokens-per-s-plain",
        *("speedup", "slower_than_plain", "no_gain"),
    ),
    experiment(
        "trace",
        5,
        "record a trace of some hundred requests, plain ones among them (forerun --trace, or the "
        "engine's step timers)",
        *("gap_share_draft", "gap_share_verify", "gap_share_overhead", "gain_of_lower_k"),
        *("gain_of_higher_k", "full_accept_share", "prefill_share", "draft_share_high"),
        *("acceptance_falls_after_partial", "acceptance_falls_after_full", "verify_linearity"),
        *("acceptance_falls_with_generation", "graphs_off", "k_change_share", "k0_share"),
    ),
    experiment(
        "replay",
        10,
        "feed the emitted text to both models with fresh caches, and compare acceptance with that "
        "of the run (forerun probe)",
        *("replay_accepts_more", "rollback_wrong", "acceptance_falls_after_handoff"),
        *("context_ratio", "card_ratio"),
    ),
    experiment(
        "self-draft",
        10,
        "let the target draft for itself: practically everything must be accepted (forerun probe)",
        "self_draft_rate",
    ),
    experiment(
        "calibration",
        10,
        "compare accepted tokens with sum(min(p, q)) at the positions reached (forerun probe)",
        *("calibration", "acceptance_above_expected", "accept_rule_ratio", "draft_probs_differ"),
        *("draft_one_hot", "exact_match_rule"),
    ),
    experiment(
        "exactness",
        15,
        "test whether the emitted tokens follow the target's law: uniformity of their probability "
        "transform (forerun probe)",
        *("pit_p_value", "law_differs", "residual_wrong"),
    ),
    experiment(
        "greedy difference",
        5,
        "compare greedy text with speculation on and off, and read the top-2 logit gap where they "
        "part",
        *("output_differs", "output_differs_at_ties", "greedy_margin", "output_corrupt"),
        *("output_differs_after_partial", "output_differs_only_batched"),
    ),
    experiment(
        "temperature sweep",
        5,
        "run the same prompts at temperature 0 and at 1, and compare acceptance at position 1",
        *("acceptance_falls_with_temperature", "temperature"),
    ),
    experiment(
        "draft sampling",
        3,
        "look up how the draft is sampled and which acceptance rule runs",
        *("draft_one_hot", "exact_match_rule", "draft_probs_differ"),
    ),
    experiment(
        "K sweep",
        10,
        "run K = 1, 2, 4, 8: note the rate, and acceptance of the same positions",
        *(
            "slower_with_k",
            "faster_with_k",
            "cost_independent_of_k",
            "acceptance_falls_with_k",
            "verify_serial",
        ),
    ),
    experiment(
        "batch sweep",
        10,
        "run 1, 8 and 32 sequences with speculation on and off",
        *("slower_with_batch", "acceptance_falls_with_batch", "memory_pressure", "batch"),
    ),
    experiment(
        "context sweep",
        10,
        "run short and long prompts, and compare acceptance and the rate apart",
        *("slower_with_context", "acceptance_falls_with_context", "context_over_window"),
    ),
    experiment(
        "by class",
        5,
        "split acceptance at position 1 by language or task, and by template or mode",
        *("acceptance_differs_by_domain", "acceptance_differs_by_template"),
    ),
    experiment(
        "templates",
        5,
        "compare the ids the draft was trained on with those it is served, for one conversation",
        *("template_differs", "template_has_modes"),
    ),
    experiment(
        "what changed",
        3,
        "list what was deployed when it began (--changed target, adapter, draft, engine, ...)",
        *("changed", "acceptance_dropped", "reference_ratio", "cost_changed_with_engine"),
    ),
    experiment(
        "other backend",
        10,
        "switch the attention backend, then graphs off, and compare acceptance and the rate",
        *("acceptance_differs_by_backend", "acceptance_differs_by_graph", "graphs_off"),
        "device_idle",
    ),
    experiment(
        "other precision",
        15,
        "run the draft and its KV cache in 16 bits, and compare acceptance",
        *("acceptance_differs_by_precision", "draft_kv_quantised", "draft_quantised"),
    ),
    experiment(
        "reference implementation",
        30,
        "measure the same draft in the code it was published with, on the same prompts",
        *("acceptance_below_reference", "features_differ"),
    ),
    experiment(
        "hand-over",
        10,
        "compare acceptance on first use with that after a cache hit, transfer or resume",
        "acceptance_falls_after_handoff",
    ),
    experiment(
        "sizes and places",
        2,
        "write down parameters of both models, devices, and how each is split",
        *("draft_size_ratio", "draft_elsewhere", "target_moe", "target_recurrent"),
        *("target_quantised", "draft_tensor_parallel"),
    ),
    experiment(
        "device sweep",
        20,
        "run on one device and on all, with speculation on and off",
        *("slower_with_tensor_parallel", "slower_with_fast_target"),
    ),
    experiment(
        "profile a step",
        15,
        "profile one step on host and device: is the device idle, and what does the host do",
        *("host_work", "device_idle", "graphs_off", "experts_dominate"),
    ),
    experiment(
        "memory and caches",
        5,
        "compare preemptions, KV blocks and prefix hits with speculation on and off",
        *("memory_pressure", "cache_hits_lower", "slow_without_drafts"),
    ),
    experiment(
        "first token",
        3,
        "compare the time to the first token and output lengths, with speculation on and off",
        *("ttft_up", "outputs_short", "prefill_share"),
    ),
    experiment(
        "two counters",
        2,
        "compare the client's rate with the server's for one run, counting token ids",
        *("tools_disagree", "client_counts_chunks", "client_ratio"),
    ),
    experiment(
        "definitions",
        2,
        "look up how each figure is defined: the bonus token, per step or per drafted token",
        *("definitions_differ", "compared_with_published"),
    ),
    experiment(
        "prompts",
        3,
        "look at the benchmark's prompts and at ten outputs",
        *("random_prompts", "ignore_eos", "benchmark_unlike_traffic", "open_ended_text"),
        *("output_repetitive", "distinct_4gram_share", "target_entropy"),
    ),
    experiment(
        "constraints",
        3,
        "check outputs of constrained requests against their schema, with speculation on and off",
        *("schema_violations", "grammar_used"),
    ),
    experiment(
        "training record",
        3,
        "look up what the draft was trained on, for how long, and whether its loss still fell",
        *("undertrained_draft", "draft_self_trained"),
    ),
    experiment(
        "rollback",
        20,
        "log cache lengths after steps that rejected something, for both models",
        *("rollback_wrong", "acceptance_falls_after_partial"),
    ),
    experiment(
        "K over time",
        3,
        "plot the K that was chosen, step by step",
        *("adaptive_k", "adaptive_stuck", "k_change_share", "k0_share"),
    ),
)


def experiment_for(cause: Cause, evidence: Evidence) -> Experiment | None:
    """The test that would move this cause most for its time; None where all is known."""
    spreads = {sign.fact: sign.spread for sign in cause.signs if sign.fact not in evidence}
    return best_of(lambda item: sum(spreads.get(fact, 0.0) for fact in item.yields))


def best_experiment(
    weights: Mapping[str, float], causes: Iterable[Cause], evidence: Evidence
) -> Experiment | None:
    """The test that tells the causes apart best for its time.

    A fact is worth the spread between causes of what it would say of them, weighted by how likely
    they are.

    Args:
        weights: how likely each cause is, by label; they add up to 1.
        causes: all of them.
        evidence: what is known already.
    """
    if not weights:
        return None
    signs = {
        cause.label: {sign.fact: sign.yes - sign.no for sign in cause.signs} for cause in causes
    }

    def worth(item: Experiment) -> float:
        total = 0.0
        for fact in item.yields:
            if fact not in evidence:
                moves = [(share, signs[label].get(fact, 0.0)) for label, share in weights.items()]
                mean = sum(share * move for share, move in moves)
                total += sqrt(sum(share * (move - mean) ** 2 for share, move in moves))
        return total

    return best_of(worth)


def best_of(worth: Callable[[Experiment], float]) -> Experiment | None:
    """The most for its time; twice the time has to tell 1.4 times as much."""
    ranked = [(worth(item) / sqrt(item.minutes), item) for item in EXPERIMENTS]
    value, item = max(ranked, key=lambda pair: pair[0])
    return item if value > 0.0 else None
