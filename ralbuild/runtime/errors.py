"""What the runtime refuses: at start (one class is one exit code) and over HTTP (one OpenAI error body)."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` would delay the first answer of `/health`
    from collections.abc import Mapping
    from typing import Any, ClassVar


class StartError(Exception):
    """The service cannot start; ``__main__`` turns it into one log line and an exit status."""

    exit_code: ClassVar[int] = 1
    passing: ClassVar[bool] = False
    """True when another process may not meet it: the supervisor starts one, and gives up after a few."""

    def __init__(self, message: str, *, place: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.place = place
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.place}: {self.message}" if self.place else self.message
        return f"{text} ({self.hint})" if self.hint else text


class BundleCorruptError(StartError):
    """The bundle or something it names differs from what was built."""

    exit_code = 80


class ModelMismatchError(StartError):
    """The model folder is not the one that the bundle was built for, or cannot be loaded."""

    exit_code = 81


class OutOfMemoryError(StartError):
    """Weights and one full-length text do not fit into the memory this process may use."""

    exit_code = 82


class SelfTestError(StartError):
    """The folded step does not give the bytes that the oracle gave at build time."""

    exit_code = 83


class HostUnfitError(StartError):
    """This host or its settings cannot run the service: port in use, bad variable, other target."""

    exit_code = 84


class PatchUnsupportedError(StartError):
    """The bundle's patch holds a step that this runtime has no implementation for."""

    exit_code = 85


class WorkerLostError(StartError):
    """The worker process dies again and again, or cannot be started."""

    exit_code = 86


class RuntimeRulesError(StartError):
    """The signed rules that this process was told to apply are not there, or not acceptable."""

    exit_code = 87


class DriverError(StartError):
    """The CUDA driver refused a call, or gave something that is not what was loaded."""

    exit_code = 88
    passing = True


class CaptureFailedError(StartError):
    """A decode graph could not be captured: only a new process can try again."""

    exit_code = 89
    passing = True


class BindingError(StartError):
    """A kernel's parameter has no value, or one that it was not compiled for: a bug on our side."""


PASSING = frozenset(kind.exit_code for kind in StartError.__subclasses__() if kind.passing)
"""Exit statuses of a worker after which another one may do better."""


class ApiError(Exception):
    """A request that is answered with an error in OpenAI's shape.

    Attributes:
        status: HTTP status.
        code: stable machine-readable reason, such as ``model_not_found``.
        param: the request field that is wrong; None when no single one is.
        retry_after: seconds for the ``Retry-After`` header; 0 for none.
        extra: further fields of the error object, such as ``measured`` and ``allowed``.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after: int = 0,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.extra = dict(extra or {})

    def body(self) -> dict[str, Any]:
        """Return the JSON body: ``{"error": {"message", "type", "param", "code"}}``."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": {**self.extra, **error}}


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
