"""Command lines of SGLang.

The flags are those of
https://docs.sglang.io/docs/advanced_features/speculative_decoding (version 0.5.23).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from forerun.tune.arms import NONE, ServerCommand, Speculation
from forerun.tune.engines.base import SOME_DRAFT, EngineDialect, Flag, write_options

METHOD = "--speculative-algorithm"
DRAFT = "--speculative-draft-model-path"
STEPS = "--speculative-num-steps"
TOP_K = "--speculative-eagle-topk"
NODES = "--speculative-num-draft-tokens"
KNOWN = (METHOD, DRAFT, STEPS, TOP_K, NODES)
"""argparse takes the beginning of a flag for the whole, such as --speculative-algo."""
CHAINS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
"""Methods that draft in steps, of as many branches as `TOP_K` says."""


class SglangDialect(EngineDialect):
    """`python -m sglang.launch_server` and `sglang serve`."""

    name = "sglang"
    programs = (("-m", "sglang.launch_server"), ("sglang", "serve"))
    model_flags = frozenset({"--model-path", "--model"})
    pattern = re.compile(
        r"--(no-)?speculative-.*|--decoupled-spec-.*|--spec-trace-dir|--uno-lora-path"
        r"|--enable-multi-layer-eagle"
    )
    switches = frozenset(
        "--enable-multi-layer-eagle --speculative-adaptive --speculative-use-rejection-sampling "
        "--speculative-use-block-verification --speculative-enable-w4a4-mxfp4-megamoe "
        "--speculative-dspark-align-verify-tokens-to-graph-tier".split()
    )
    metrics_flag = "--enable-metrics"
    methods: Mapping[str, str] = {
        **{word: word.upper() for word in "ngram eagle eagle3 nextn standalone dflash".split()},
        **{"dspark": "DSPARK", "mtp": "NEXTN", SOME_DRAFT: "STANDALONE"},
    }
    weightless = frozenset({"NGRAM", "NEXTN"})
    usual = (Speculation(method="NGRAM"),)

    def read_flags(self, flags: Sequence[Flag]) -> Speculation:
        values: dict[str, Flag] = {}
        for flag in flags:
            name = next((known for known in KNOWN if known.startswith(flag.name)), flag.name)
            values[name] = flag
        method, draft = (values.pop(n).value if n in values else None for n in (METHOD, DRAFT))
        steps, nodes = (values[n].count() if n in values else None for n in (STEPS, NODES))
        is_tree = TOP_K in values and values[TOP_K].count() > 1
        if steps is None and nodes is not None and not is_tree:
            steps = max(1, nodes - 1)
        for name in (STEPS,) if is_tree else (STEPS, TOP_K, NODES):
            values.pop(name, None)
        return Speculation(
            method=NONE if method is None or method.lower() == NONE else method.upper(),
            draft=draft,
            k=steps,
            options=tuple((name, flag.value) for name, flag in values.items()),
        )

    def write_flags(self, speculation: Speculation, command: ServerCommand) -> tuple[str, ...]:
        method, k = speculation.method, speculation.k
        if method == NONE:
            return ()
        words = [METHOD, method]
        if speculation.draft is not None:
            words += [DRAFT, speculation.draft]
        is_tree = any(name == TOP_K for name, _ in speculation.options)
        if k is not None:
            words += [STEPS, str(k)] if method in CHAINS else []
            words += [TOP_K, "1"] if method in CHAINS and not is_tree else []
            words += [] if is_tree else [NODES, str(k + 1)]
        return (*words, *write_options(speculation.options))

    def choose_ks(self, speculation: Speculation) -> tuple[int | None, ...]:
        method = speculation.method
        if method == "NGRAM":
            return (None, 4)
        if method not in CHAINS or any(name == TOP_K for name, _ in speculation.options):
            return (None,)  # the number of nodes of a tree goes with its depth
        return (1, 3) if method == "NEXTN" else (2, 4, 7)
