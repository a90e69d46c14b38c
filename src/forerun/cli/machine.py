"""Flags that describe another machine and the models on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from forerun.errors import InvalidRequest
from forerun.plan.roofline import PRESETS, Machine, ModelSize, preset

if TYPE_CHECKING:
    from forerun.probe.profile import Profile

__all__ = ["MachineFlags"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFlags:
    """A machine described by its data sheet, from which a roofline estimates costs."""

    machine: Annotated[
        str | None,
        arg(metavar="NAME", help=f"Plan for this machine by its data sheet: {', '.join(PRESETS)}."),
    ] = None
    flops: float | None = None
    """Dense operations per second, for a machine of your own or instead of the data sheet's."""
    bandwidth: float | None = None
    """Bytes per second it reads."""
    launch_us: float | None = None
    """Microseconds every pass costs before it computes."""
    step_us: float | None = None
    """Microseconds every step costs outside the passes."""
    target_params: float | None = None
    """Parameters of the target; by default its weights as profiled."""
    draft_params: float | None = None
    """Parameters of the draft; by default its weights as profiled."""
    weight_bytes: float = 2.0
    """Bytes per parameter."""
    kv_token_bytes: float | None = None
    """Bytes of keys and values per token of the target; by default as profiled, else 0."""

    @property
    def chosen(self) -> Machine | None:
        """Return the machine that the flags describe; None if they describe none.

        Raises:
            InvalidRequest: the name is unknown, or the description has no rates.
        """
        rates = {"flops_per_s": self.flops, "bytes_per_s": self.bandwidth}
        overheads = {"launch_s": self.launch_us, "step_s": self.step_us}
        given: dict[str, Any] = {
            **{name: rate for name, rate in rates.items() if rate is not None},
            **{name: 1e-6 * us for name, us in overheads.items() if us is not None},
        }
        if self.machine is not None:
            found = preset(self.machine)
            return replace(found, **given, source=f"{found.source}, changed") if given else found
        if not given:
            self._check_unused()
            return None
        if self.flops is None or self.bandwidth is None:
            raise InvalidRequest("describe a machine by --flops and --bandwidth, or name --machine")
        return Machine(name="the machine described", **given)

    def _check_unused(self) -> None:
        for flag in ("target_params", "draft_params", "kv_token_bytes"):
            if getattr(self, flag) is not None:
                raise InvalidRequest(
                    f"--{flag.replace('_', '-')} describes models on a --machine; name one"
                )

    def sizes(self, profile: Profile | None) -> tuple[ModelSize, ModelSize | None]:
        """Return the sizes of target and draft: those of the flags, otherwise those of the profile.

        Raises:
            InvalidRequest: nothing says how large the target is.
        """
        limit = None if profile is None else profile.limit
        target, draft = self.target_params, self.draft_params
        if limit is not None:
            target = limit.target_bytes / self.weight_bytes if target is None else target
            draft = limit.draft_bytes / self.weight_bytes if draft is None else draft
        if target is None:
            raise InvalidRequest(
                "the machine does not define the models: give --target-params and --draft-params, "
                "or a --profile of the pair"
            )
        kv = self.kv_token_bytes
        if kv is None:
            kv = 0.0 if limit is None else float(limit.kv_token_bytes)
        return self._size(target, kv), None if draft is None else self._size(draft, 0.0)

    def _size(self, num_parameters: float, kv_token_bytes: float) -> ModelSize:
        return ModelSize(
            num_parameters=num_parameters,
            weight_bytes=num_parameters * self.weight_bytes,
            kv_token_bytes=kv_token_bytes,
        )
