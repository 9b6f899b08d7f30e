"""Every exception the library raises.

GemmsmithError
├── InvalidProblem          the problem is invalid; names the field
├── ServiceError            the service answered with a problem document (RFC 9457)
│   ├── NotTuned            404: nothing known about this problem yet; tune it
│   │   └── NotUnderstood   only a newer gemmsmith can run the answer
│   ├── Rejected            any other 4xx: the request is invalid
│   │   ├── Unauthorized    401: the API key is missing or unknown
│   │   └── Forbidden       403: the API key lacks the required scope
│   ├── Busy                429 or 503: try again later (`retry_after` seconds)
│   └── ServiceFault        any other 5xx: internal error of the service
├── ServiceUnavailable      no answer: connection refused, timeout
├── SnapshotCorrupt         a snapshot was altered, or is unreadable
├── SnapshotUnavailable     rank 0 could not fetch the snapshot that all ranks share
├── JobFailed               a tuning job ended without a winner
├── JobCancelled            a tuning job was cancelled
├── NotInvariant            no kernel gives the rows of a product the same bits at every M
├── Untrusted               no trusted signature
└── PackError               a kernel pack cannot be used
    ├── PackCorrupt         its bytes do not match its hash, or it is truncated
    ├── PackUntrusted       in no snapshot with a trusted signature
    ├── PackIncompatible    built for another C ABI version or architecture
    └── LaunchFailed        the kernel refused or failed to launch
"""

from __future__ import annotations

from typing import Any

from gemmsmith.showing import line


class GemmsmithError(Exception):
    """Root of every exception this library raises. Its message is one line, without passwords."""

    def __str__(self) -> str:
        return line(super().__str__())


class InvalidProblem(GemmsmithError, ValueError):
    """The problem is invalid. `field` names the invalid field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class NotInvariant(GemmsmithError, RuntimeError):
    """No kernel of the demanded order of sums runs a product; see `gemmsmith.use(numerics=…)`.

    Below torch's operators it is a plain RuntimeError with the same message.
    """


class ServiceError(GemmsmithError):
    """The service answered with an RFC 9457 problem document.

    Attributes:
        status: HTTP status code.
        title: the document's short title.
        detail: what is wrong, and what to do.
        document: the parsed document.
    """

    def __init__(
        self, status: int, title: str, detail: str, document: dict[str, Any] | None = None
    ) -> None:
        self.status = status
        self.title = line(title)
        self.detail = line(detail)
        super().__init__(f"{status} {self.title}: {self.detail}".removesuffix(": "))
        self.document = document or {}


class NotTuned(ServiceError):
    """Nothing is known about this problem yet. Call `Client.tune` and wait for the job.

    Attributes:
        call: that call, as Python source; empty if it is not known.
    """

    call = ""

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text.rstrip('.')}. Tune it with {self.call}" if self.call else text


class NotUnderstood(NotTuned):
    """The answer has something that this version does not support: run torch's own operator.

    A newer gemmsmith can run it. For this version there is no winner.
    """


class Rejected(ServiceError):
    """The request is invalid; `detail` names the field and the accepted range."""


class Unauthorized(Rejected):
    """The service requires an API key: `Client(api_key=…)`, or GEMMSMITH_API_KEY."""


class Forbidden(Rejected):
    """The API key lacks the required scope; `detail` names it."""


class Busy(ServiceError):
    """The service is overloaded; try again after `retry_after` seconds."""

    def __init__(
        self,
        status: int,
        title: str,
        detail: str,
        document: dict[str, Any] | None = None,
        retry_after: float = 1.0,
    ) -> None:
        super().__init__(status, title, detail, document)
        self.retry_after = retry_after


class ServiceFault(ServiceError):
    """An internal error of the service, or an invalid answer; its log has the cause."""


class ServiceUnavailable(GemmsmithError):
    """The service did not answer, and nothing is cached."""


class SnapshotCorrupt(GemmsmithError):
    """The document is not a valid snapshot, or was altered. Fetch or save it again."""


class SnapshotUnavailable(GemmsmithError):
    """Rank 0 could not fetch the snapshot for all ranks; raised on every rank."""


class JobFailed(GemmsmithError):
    """A tuning job ended without a winner; the message is the job's own error."""


class JobCancelled(GemmsmithError):
    """A tuning job was cancelled before it found a winner."""


class PackError(GemmsmithError):
    """A kernel pack cannot be used."""


class PackCorrupt(PackError):
    """The pack's bytes do not match its hash, or the file is truncated. Fetch or build it again."""


class PackUntrusted(PackError):
    """The pack is in no snapshot with a signature that is trusted on this machine."""


class Untrusted(GemmsmithError):
    """Data from outside has no trusted signature."""


class PackIncompatible(PackError):
    """The pack was built for another C ABI version or another GPU architecture."""


class LaunchFailed(PackError):
    """The kernel refused the problem or failed to launch. `status` is the C ABI's code."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
