"""Follows the memory of the GPU that a worker uses, from a process that outlives the worker."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from ralbuild.runtime.log import log_event
from ralbuild.runtime.nvml import LIBRARY, Nvml, NvmlError


def used_bytes(uuid: str, library: str = LIBRARY) -> int:
    """Return the bytes in use on a device now; -1, and a line in the log, when the driver does not say."""
    try:
        nvml = Nvml(library)
        try:
            return nvml.memory(uuid).used
        finally:
            nvml.close()
    except NvmlError as error:
        log_event("gpu memory unknown", device=uuid, reason=error)
        return -1


class GpuMemory:
    """One device. Reading may block in the driver, so the supervisor reads in a thread."""

    def __init__(self, uuid: str, before: int, library: str = LIBRARY) -> None:
        """Take the device.

        Args:
            uuid: as the driver writes it.
            before: bytes in use on it before the first worker touched it; -1 when nobody knows.
        """
        self.uuid = uuid
        self.before = before
        self._library = library
        self._nvml: Nvml | None = None
        self._failed = ""
        self._lock = threading.Lock()

    def read(self, worker: int | None) -> Mapping[str, int]:
        """Return bytes by kind: ``total``, ``reserved``, ``free``, ``used``, and ``worker`` where known.

        A container sees the host's process numbers only with the host's name space, so ``worker`` may be
        missing. Empty when the driver does not answer; the log has the reason, once for each reason.

        Args:
            worker: number of the worker's process, None without one.
        """
        with self._lock:
            try:
                self._nvml = nvml = self._nvml or Nvml(self._library)
                memory = nvml.memory(self.uuid)
                found = {
                    "total": memory.total,
                    "reserved": memory.reserved,
                    "free": memory.free,
                    "used": memory.used,
                }
                if worker is not None:
                    own = nvml.processes(self.uuid).get(worker)
                    if own is not None:
                        found["worker"] = own
            except NvmlError as error:
                if self._failed != str(error):
                    self._failed = str(error)
                    log_event("gpu memory unknown", device=self.uuid, reason=error)
                return {}
            self._failed = ""
            return found
