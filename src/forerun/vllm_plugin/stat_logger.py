"""The entry point of `vllm.stat_logger_plugins`: vLLM makes one object per server process."""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY

from forerun.vllm_plugin.observer import NAME, VllmObserver, logger

try:
    from vllm import __version__ as vllm_version
    from vllm.v1.metrics.loggers import AggregateStatLoggerBase
except ImportError as error:  # vLLM logs it and goes on
    raise ImportError(f"{NAME} does not know the loggers of this vLLM: {error}") from error


class ForerunStatLogger(AggregateStatLoggerBase):  # type: ignore[misc]  # vLLM has no types here
    """Passes statistics to the observer, which is None where it could not be made.

    vLLM calls it with the arguments of its version, and an exception would end the server.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        self.observer: VllmObserver | None = None
        try:
            config = named["vllm_config"] if "vllm_config" in named else given[0]
            self.observer = VllmObserver(config, vllm_version, REGISTRY)
        except Exception:  # noqa: BLE001  # of a config that another version made
            words = "%s does not start in vLLM %s, which goes on"
            logger.exception(words, NAME, vllm_version)

    def record(self, *given: Any, **named: Any) -> None:
        """Queue the statistics of a step."""
        if self.observer is not None:
            try:
                self.observer.record(*given, **named)
            except TypeError as error:
                self.observer.fail(error)

    def log_engine_initialized(self) -> None:
        """Begin to count."""
        if self.observer is not None:
            self.observer.start()


if missing := sorted(ForerunStatLogger.__abstractmethods__):
    raise ImportError(f"{NAME} lacks {', '.join(missing)}, which vLLM {vllm_version} asks for")
