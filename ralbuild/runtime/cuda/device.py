"""All of torch.cuda that is used: one device, one stream, graphs, pinned memory, events.

Tests replace this class by one over ordinary memory, so it decides nothing: what runs, and in which
order, is in `graphs` and `decode`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from ralbuild.runtime.cuda.driver import Stream
from ralbuild.runtime.errors import DriverError

Replay: TypeAlias = Callable[[], None]
"""Puts a captured step on the stream."""
Wait: TypeAlias = Callable[[], None]
"""Waits until what was on the stream at some moment is done."""


@contextlib.contextmanager
def cuda_errors() -> Iterator[None]:
    """Tell an error of CUDA from one of ours.

    Raises:
        DriverError: for the former. It stays with the context: only a new process can go on. Memory that
            torch does not get is no such error.
    """
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if not any(name in str(error) for name in ("CUDA", "CUBLAS", "CUDNN")):
            raise
        raise DriverError(str(error).partition("\n")[0], place="torch") from error


class Device:
    """One GPU as torch drives it: the primary context that `driver.Driver` retains as well.

    Attributes:
        place: torch's name for it.
        stream: the one stream that everything runs on, as the driver knows it.
    """

    def __init__(self, number: int = 0) -> None:
        """Initialise torch.cuda; call after `Driver`, which turns just-in-time compilation off."""
        self.place = torch.device("cuda", number)
        torch.cuda.set_device(self.place)
        # cuDNN's attention compiles kernels when it runs; the base has no compiler.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self._stream = torch.cuda.Stream(self.place)
        self.stream = Stream(self._stream.cuda_stream)
        self._memory = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Let the body's torch operations run on the stream; raises as `cuda_errors`."""
        with (
            cuda_errors(),
            torch.no_grad(),
            torch.cuda.device(self.place),
            torch.cuda.stream(self._stream),
        ):
            yield

    def capture(self, body: Callable[[], None]) -> Replay:
        """Record what ``body`` puts on the stream; memory comes from one pool that all captures share.

        An unsafe call of any thread fails the capture (torch's ``global`` mode), rather than going unseen.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="global"):
            body()
        replay: Replay = graph.replay
        return replay

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return host memory that the device writes to by itself."""
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def fetch(self, host: Tensor, source: Tensor) -> None:
        """Copy to pinned memory, after what is on the stream; a `mark` tells when it is complete."""
        host.copy_(source, non_blocking=True)

    def mark(self) -> Wait:
        """Return what waits for all that is on the stream now."""
        event = torch.cuda.Event()
        event.record(self._stream)
        wait: Wait = event.synchronize
        return wait
