"""Settings of an engine; torch-free, so that the command line can read them cheaply."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

from forerun.control.base import Plan, Tree
from forerun.control.config import ControllerName, check_name
from forerun.errors import InvalidRequest, Range, check_ranges
from forerun.models.architecture import RUNNERS, WEIGHT_FORMATS, Runner, WeightFormat

Sharing = Literal["tenant", "all", "none"]

OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "model": "target, the first argument",
        "draft_model": "draft",
        "assistant_model": "draft",
        "speculative_model": "draft",
        "speculative_config": "draft and num_speculative_tokens",
        "max_model_len": "max_context",
        "max_num_seqs": "max_batch",
        "max_num_batched_tokens": "max_step_rows",
        "num_assistant_tokens": "num_speculative_tokens",
        "k": "num_speculative_tokens",
        "torch_dtype": "dtype",
        "device_map": "device",
    }
)
"""Names of settings in vLLM and transformers, with their names here."""

MAX_THREADS = 1024
"""Most threads; the thread library crashes with far more."""

logger = logging.getLogger("forerun.config")

MAX_NODES = 65_536
"""Most drafted tokens of a step; no pass has room for more."""

RANGES = (
    Range("num_speculative_tokens", 0, MAX_NODES, integer=True),
    Range("max_tree_nodes", 0, MAX_NODES, integer=True),
    Range("max_batch", 1, integer=True),
    Range("max_context", 2, integer=True),
    Range("prefill_chunk", 1, integer=True),
    Range("max_step_rows", 1, 1 << 31, integer=True),
    Range("max_waiting", 0, integer=True),
    Range("max_kv_tokens", 1, integer=True, optional=True),
    Range("num_kept", 0, integer=True),
    Range("cycles_per_call", 1, 8, integer=True),
    Range("num_threads", 1, MAX_THREADS, integer=True, optional=True),
)
TERM_RANGES = (
    Range("priority", -math.inf, integer=True),
    Range("deadline_s", 0, above_low=True, optional=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of an engine; settings of single requests are in SamplingParams.

    Attributes:
        num_speculative_tokens: K, most tokens of a drafted chain (0: plain decoding).
        tree: shape of every draft, for drafters that propose trees; None lets the controller
            choose.
        max_tree_nodes: most nodes of a tree that a controller chooses; less where a pass has fewer
            rows for a sequence. A tree is at most K levels deep, and may have K nodes in any case.
        controller: what chooses how many tokens are drafted at every step. "auto": as many, up to
            K, as give most expected tokens per second, down to plain decoding where drafting is
            slower; costs that are not given are learned from the steps; "fixed": always K.
        max_batch: most sequences decoded at once; the others wait.
        max_context: prompt plus output tokens a sequence may have, cut to what the model allows; KV
            memory grows with max_batch x max_context.
        prefill_chunk: most prompt tokens of one sequence fed in one pass.
        max_step_rows: most rows of one target pass over all sequences.
        max_waiting: most sequences that may wait for a place; further ones are refused.
        max_kv_tokens: most rows that running sequences may have in the KV together. Beyond, the
            youngest of the lowest priority waits and is read again later (None: no limit but
            max_batch x max_context).
        sharing: which requests may reuse what was computed from each other's tokens: KV of a common
            beginning, and what a drafter has learned. "tenant": within a tenant; "all": across
            tenants too; "none": only the samples of one request share their prompt.
        num_kept: places in the KV beyond max_batch, each of max_context tokens, where sequences
            that ended are kept for others that begin alike. Idle places keep some anyway.
        runner: the implementation of the passes of target and draft; "auto": the fastest available.
        num_threads: of the native CPU runner, whose threads all models of a process share; None: as
            many as torch uses. torch itself is set to one thread beside it.
        cycles_per_call: most cycles that the native runner computes in one call, within 20 ms, for
            requests that need nothing from Python between them; 1 takes every step by itself.
        weights: bits of the target's weight matrices on the native runner: "int8", "int4", or
            "int4-int8" with an output layer of 8 bits. "auto": as they are stored.
        draft_weights: the same of draft models.

    Raises:
        InvalidRequest: a value cannot work; the message names it.
    """

    num_speculative_tokens: int = 8
    tree: Tree | None = None
    max_tree_nodes: int = 16
    controller: ControllerName = "auto"
    max_batch: int = 8
    max_context: int = 4096
    prefill_chunk: int = 256
    max_step_rows: int = 1024
    max_waiting: int = 1024
    max_kv_tokens: int | None = None
    sharing: Sharing = "tenant"
    num_kept: int = 0
    runner: Runner = "auto"
    num_threads: int | None = None
    cycles_per_call: int = 8
    weights: WeightFormat = "auto"
    draft_weights: WeightFormat = "auto"

    def __post_init__(self) -> None:
        """Check every field, and fields that depend on each other."""
        check_ranges(self, *RANGES)
        if self.runner not in RUNNERS:
            raise InvalidRequest(f"runner {self.runner!r} is unknown; use {', '.join(RUNNERS)}")
        for weights in (self.weights, self.draft_weights):
            if weights not in WEIGHT_FORMATS:
                raise InvalidRequest(
                    f"weights {weights!r} are unknown; use {', '.join(WEIGHT_FORMATS)}"
                )
        check_name(self.controller)
        if self.sharing not in get_args(Sharing):
            raise InvalidRequest(
                f"sharing is {self.sharing!r}; use one of {', '.join(get_args(Sharing))}"
            )
        if self.tree is not None:
            object.__setattr__(self, "tree", self._fitting(self.tree))
        if self.max_step_rows < self.max_batch * (self.max_chain + 1):
            raise InvalidRequest(
                f"max_step_rows is {self.max_step_rows}, below max_batch x (K + 1) = "
                f"{self.max_batch * (self.max_chain + 1)}, where K counts the nodes of a tree too; "
                "raise it or lower K"
            )
        alone = self.max_context + self.max_chain
        if self.max_kv_tokens is not None and self.max_kv_tokens < alone:
            raise InvalidRequest(
                f"max_kv_tokens is {self.max_kv_tokens}, but one sequence may need max_context + K "
                f"= {alone}; raise it or lower max_context"
            )

    def _fitting(self, tree: Tree) -> Tree:
        """Return the tree, cut with a warning to the rows of a pass and the length of a context."""
        room = min(self.max_step_rows // self.max_batch, self.max_context) - 1
        if room < 1:
            return tree  # refused below
        cut = replace(tree, num_nodes=min(tree.num_nodes, room), depth=min(tree.depth, room))
        if cut != tree:
            logger.warning(
                "the draft tree %s is cut to %s: a pass has %d rows for %d sequences, and a "
                "context %d tokens",
                *(tree, cut, self.max_step_rows, self.max_batch, self.max_context),
            )
        return cut

    def with_settings(self, settings: Mapping[str, object]) -> EngineConfig:
        """Return these settings with some fields changed.

        Raises:
            InvalidRequest: there is no such field, or a value cannot work.
        """
        known = [field.name for field in fields(self)]
        for name in settings:
            if name not in known:
                hint = OTHER_NAMES.get(name)
                raise InvalidRequest(
                    f"there is no setting {name!r}"
                    + (f"; it is called {hint} here" if hint else f"; there are {', '.join(known)}")
                )
        changes: dict[str, Any] = dict(settings)
        return replace(self, **changes) if changes else self

    @property
    def max_chain(self) -> int:
        """Maximum length of a drafted chain: K, or the number of nodes of the configured tree."""
        return self.num_speculative_tokens if self.tree is None else self.tree.num_nodes

    @property
    def max_nodes(self) -> int:
        """Maximum number of draft nodes of one sequence in a step, each a row of the pass."""
        if self.tree is not None or self.num_speculative_tokens == 0:
            return self.max_chain
        room = self.max_step_rows // self.max_batch - 1
        if self.max_kv_tokens is not None:
            room = min(room, self.max_kv_tokens - self.max_context)
        return max(self.num_speculative_tokens, min(self.max_tree_nodes, room))

    @property
    def num_slots(self) -> int:
        """Number of sequences that the KV store has room for."""
        return self.max_batch + self.num_kept

    def scope_of(self, tenant: str | None) -> str | None:
        """Return the scope in which a tenant's requests share tokens; None if they share none."""
        if self.sharing == "none":
            return None
        return "" if tenant is None or self.sharing == "all" else tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTerms:
    """Scheduling settings of a request, which do not change the distribution of its text.

    Attributes:
        priority: lower goes first, and may take the place of a running sequence that is higher;
            that one waits and goes on later.
        deadline_s: seconds from its arrival after which it ends with what it has; None: no limit.
        tenant: name of the user or group that sent it. Tenants share nothing with each other
            unless `sharing` is "all"; requests without a tenant share among themselves.
        tags: labels, such as its task; a controller expects the same acceptance of requests with
            the same tags.
        plan: what every step of it drafts, cut to the engine's K; `Plan()` decodes it plainly. None
            leaves it to the controller.
        speculation: "off" decodes it plainly, as the plan `Plan()` does.

    Raises:
        InvalidRequest: a value is out of range; the message names it.
    """

    priority: int = 0
    deadline_s: float | None = None
    tenant: str | None = None
    tags: tuple[str, ...] = ()
    plan: Plan | None = None
    speculation: Literal["auto", "off"] = "auto"

    def __post_init__(self) -> None:
        check_ranges(self, *TERM_RANGES)
        tenant: object = self.tenant  # callers need not have checked their types
        if tenant is not None and (not isinstance(tenant, str) or tenant == ""):
            raise InvalidRequest(f"tenant is {tenant!r}; it must be a name, or None")
        if self.speculation not in ("auto", "off"):
            raise InvalidRequest(f"speculation is {self.speculation!r}; it must be auto or off")
        if self.speculation == "off" and self.plan not in (None, Plan()):
            raise InvalidRequest("speculation is off, and a plan that drafts is given: leave one")
