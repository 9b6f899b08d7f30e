"""Every exception the library raises.

GemmsmithError
├── InvalidProblem          a problem that no kernel could compute; names the field
├── ServiceError            the service answered with a problem document (RFC 9457)
│   ├── NotTuned            404: nothing known about this problem yet; tune it
│   │   └── NotUnderstood   there is an answer, which a newer gemmsmith can run
│   ├── Rejected            any other 4xx: the request is wrong
│   │   ├── Unauthorized    401: no API key was sent, or one that the service does not know
│   │   └── Forbidden       403: the API key lacks the scope that this takes
│   ├── Busy                429 or 503: try again later (`retry_after` seconds)
│   └── ServiceFault        5xx
├── ServiceUnavailable      no answer: connection refused, time-out
├── SnapshotCorrupt         a snapshot's winners are not those of its revision, or unreadable
├── SnapshotUnavailable     rank 0 could not fetch the snapshot that all ranks share
├── JobFailed               a tuning job ended without a winner
├── JobCancelled            a tuning job was cancelled
├── Untrusted               not signed by anybody who is believed here
└── PackError               a kernel pack cannot be used
    ├── PackCorrupt         its bytes do not match its hash, or it is truncated
    ├── PackUntrusted       named by no snapshot that is signed by anybody believed here
    ├── PackIncompatible    built for another C ABI version or architecture
    └── LaunchFailed        the kernel refused or failed to launch
"""

from __future__ import annotations

from typing import Any


class GemmsmithError(Exception):
    """Root of every exception this library raises."""


class InvalidProblem(GemmsmithError, ValueError):
    """A problem that no kernel could compute. `field` names the offending field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class ServiceError(GemmsmithError):
    """The service answered with an RFC 9457 problem document.

    Attributes:
        status: HTTP status code.
        title: the document's short title.
        detail: what is wrong and what to do about it.
        document: the whole document as parsed.
    """

    def __init__(
        self, status: int, title: str, detail: str, document: dict[str, Any] | None = None
    ) -> None:
        super().__init__(f"{status} {title}: {detail}" if detail else f"{status} {title}")
        self.status = status
        self.title = title
        self.detail = detail
        self.document = document or {}


class NotTuned(ServiceError):
    """Nothing is known about this problem yet. Call `Client.tune` and wait for the job.

    Attributes:
        call: that call, exactly; empty where there is none to make.
    """

    call = ""

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text.rstrip('.')}. Tune it with {self.call}" if self.call else text


class NotUnderstood(NotTuned):
    """The answer names something that this version does not know: run torch's own operator.

    A newer gemmsmith can run it. To this one it is as if there were no winner.
    """


class Rejected(ServiceError):
    """The request itself is wrong; `detail` names the field and the accepted range."""


class Unauthorized(Rejected):
    """The service wants an API key: `Client(api_key=…)`, or GEMMSMITH_API_KEY."""


class Forbidden(Rejected):
    """The API key lacks the scope that this takes; `detail` says which."""


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
    """The service failed while answering; its log has the cause."""


class ServiceUnavailable(GemmsmithError):
    """No answer from the service, and nothing cached for this problem."""


class SnapshotCorrupt(GemmsmithError):
    """A document that is not a snapshot, or not the one it says. Fetch or save it again."""


class SnapshotUnavailable(GemmsmithError):
    """Rank 0 could not fetch the snapshot that all ranks share; raised on every rank alike."""


class JobFailed(GemmsmithError):
    """A tuning job ended without a winner; the message is the job's own error."""


class JobCancelled(GemmsmithError):
    """A tuning job was cancelled before it found a winner."""


class PackError(GemmsmithError):
    """A kernel pack cannot be used."""


class PackCorrupt(PackError):
    """The pack's bytes do not match its hash, or the file is truncated. Fetch or build it again."""


class PackUntrusted(PackError):
    """No snapshot names the pack that is signed by anybody who is believed on this machine."""


class Untrusted(GemmsmithError):
    """Something from elsewhere is not signed by anybody who is believed here."""


class PackIncompatible(PackError):
    """The pack was built for another C ABI version or another GPU architecture."""


class LaunchFailed(PackError):
    """The kernel refused the problem or failed to launch. `status` is the C ABI's code."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
