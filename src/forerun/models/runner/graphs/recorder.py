"""Recording of device work, to replay it with one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = ["CudaRecorder", "GraphRecorder"]


@runtime_checkable
class GraphRecorder(Protocol):
    """Records a function of fixed buffers."""

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Record what `run` does to its buffers and return a function that repeats it.

        The result may be overwritten by any later call of anything recorded here.

        Args:
            run: reads and writes the same tensors at every call and never waits for the device.
        """


class CudaRecorder:
    """CUDA graphs over one memory pool.

    Recordings share the pool because they are played one after another on one stream; it is as
    large as the largest of them.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Run once to compile and to let libraries set themselves up, then capture.

        What other threads do on the device meanwhile does not matter.

        Raises:
            torch.OutOfMemoryError: there is no room for what the recording needs.
        """
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no annotations here
            side.wait_stream(current)
            with torch.cuda.stream(side):
                run()
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = run()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay
