"""gemmsmith: look up the fastest GEMM kernel, and run it from PyTorch.

Importing this module is cheap, because every name below is imported on first use. A program that
only builds problems does not load an HTTP client, and a program that only looks up winners does not
load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gemmsmith import moved

if TYPE_CHECKING:
    from gemmsmith import distributed as distributed
    from gemmsmith import runtime as runtime
    from gemmsmith.answers.answer import (
        Answer,
        Conditions,
        Correctness,
        Ratio,
        Statistics,
        TunedAnswer,
    )
    from gemmsmith.answers.history import Origin, Revision
    from gemmsmith.answers.snapshot import Choice, Snapshot
    from gemmsmith.core.bounds import Bounds
    from gemmsmith.core.candidate import Candidate
    from gemmsmith.core.config import Config, Match, Use
    from gemmsmith.core.device import DeviceModel, Environment
    from gemmsmith.core.kernel import (
        CublasLtKernel,
        CuteKernel,
        Cutlass2xKernel,
        Cutlass3xKernel,
        Kernel,
    )
    from gemmsmith.core.launch import Launch
    from gemmsmith.core.operation import DType, Element, Layout, Operation
    from gemmsmith.core.problem import Problem
    from gemmsmith.core.tuning import Effort, JobState
    from gemmsmith.errors import (
        Busy,
        Forbidden,
        GemmsmithError,
        InvalidProblem,
        JobCancelled,
        JobFailed,
        LaunchFailed,
        NotTuned,
        NotUnderstood,
        PackCorrupt,
        PackError,
        PackIncompatible,
        PackUntrusted,
        Rejected,
        ServiceError,
        ServiceFault,
        ServiceUnavailable,
        SnapshotCorrupt,
        SnapshotUnavailable,
        Unauthorized,
    )
    from gemmsmith.http.aio import AsyncClient, AsyncTuningJob
    from gemmsmith.http.client import Client
    from gemmsmith.http.handles import TuningJob
    from gemmsmith.http.jobs import JobEvent, JobStatus
    from gemmsmith.ops import (
        InvarianceReport,
        Shapes,
        capture,
        check_invariance,
        compare,
        grouped_mm,
        int8_mm,
        linear,
        matmul,
        patch,
        scaled_mm,
        unpatch,
        use,
    )
    from gemmsmith.ops.graphs.inductor import inductor_pass
    from gemmsmith.ops.products.feedforward import mlp
    from gemmsmith.ops.products.gated import gated_linear
    from gemmsmith.ops.products.mixture import experts
    from gemmsmith.ops.products.scaled import scaled_linear
    from gemmsmith.ops.products.scaled_gated import scaled_gated_linear
    from gemmsmith.winners.bundle import Bundle
    from gemmsmith.winners.lookup import Lookup
    from gemmsmith.winners.packs import Packs

    __version__: str

moved.install()

_MODULES = {
    "http.aio": ("AsyncClient", "AsyncTuningJob"),
    "answers.answer": ("Answer", "Conditions", "Correctness", "Ratio", "Statistics", "TunedAnswer"),
    "core.bounds": ("Bounds",),
    "winners.bundle": ("Bundle",),
    "core.config": ("Config", "Match", "Use"),
    "core.candidate": ("Candidate",),
    "http.client": ("Client",),
    "core.device": ("DeviceModel", "Environment"),
    "errors": (
        "Busy",
        "Forbidden",
        "GemmsmithError",
        "InvalidProblem",
        "JobCancelled",
        "JobFailed",
        "LaunchFailed",
        "NotTuned",
        "NotUnderstood",
        "PackCorrupt",
        "PackError",
        "PackIncompatible",
        "PackUntrusted",
        "Rejected",
        "ServiceError",
        "ServiceFault",
        "ServiceUnavailable",
        "SnapshotCorrupt",
        "SnapshotUnavailable",
        "Unauthorized",
    ),
    "http.handles": ("TuningJob",),
    "answers.history": ("Origin", "Revision"),
    "http.jobs": ("JobEvent", "JobStatus"),
    "core.kernel": ("CublasLtKernel", "CuteKernel", "Cutlass2xKernel", "Cutlass3xKernel", "Kernel"),
    "core.launch": ("Launch",),
    "winners.lookup": ("Lookup",),
    "ops": (
        "InvarianceReport",
        "Shapes",
        "capture",
        "check_invariance",
        "compare",
        "grouped_mm",
        "int8_mm",
        "linear",
        "matmul",
        "patch",
        "scaled_mm",
        "unpatch",
        "use",
    ),
    "ops.products.feedforward": ("mlp",),
    "ops.products.gated": ("gated_linear",),
    "ops.graphs.inductor": ("inductor_pass",),
    "ops.products.mixture": ("experts",),
    "ops.products.scaled": ("scaled_linear",),
    "ops.products.scaled_gated": ("scaled_gated_linear",),
    "core.operation": ("DType", "Element", "Layout", "Operation"),
    "winners.packs": ("Packs",),
    "core.problem": ("Problem",),
    "answers.snapshot": ("Choice", "Snapshot"),
    "core.tuning": ("Effort", "JobState"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncTuningJob",
    "Bounds",
    "Bundle",
    "Busy",
    "Candidate",
    "Choice",
    "Client",
    "Conditions",
    "Config",
    "Correctness",
    "CublasLtKernel",
    "CuteKernel",
    "Cutlass2xKernel",
    "Cutlass3xKernel",
    "DType",
    "DeviceModel",
    "Effort",
    "Element",
    "Environment",
    "Forbidden",
    "GemmsmithError",
    "InvalidProblem",
    "InvarianceReport",
    "JobCancelled",
    "JobEvent",
    "JobFailed",
    "JobState",
    "JobStatus",
    "Kernel",
    "Launch",
    "LaunchFailed",
    "Layout",
    "Lookup",
    "Match",
    "NotTuned",
    "NotUnderstood",
    "Operation",
    "Origin",
    "PackCorrupt",
    "PackError",
    "PackIncompatible",
    "PackUntrusted",
    "Packs",
    "Problem",
    "Ratio",
    "Rejected",
    "Revision",
    "ServiceError",
    "ServiceFault",
    "ServiceUnavailable",
    "Shapes",
    "Snapshot",
    "SnapshotCorrupt",
    "SnapshotUnavailable",
    "Statistics",
    "TunedAnswer",
    "TuningJob",
    "Unauthorized",
    "Use",
    "capture",
    "check_invariance",
    "compare",
    "experts",
    "gated_linear",
    "grouped_mm",
    "inductor_pass",
    "int8_mm",
    "linear",
    "matmul",
    "mlp",
    "patch",
    "scaled_gated_linear",
    "scaled_linear",
    "scaled_mm",
    "unpatch",
    "use",
]


if not TYPE_CHECKING:  # type checkers must see only the names that are listed above

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            value = getattr(import_module(f"gemmsmith.{_HOME[name]}"), name)
        elif name in ("distributed", "runtime"):
            value = import_module(f"gemmsmith.{name}")
        elif name == "__version__":
            value = import_module("gemmsmith.version").VERSION
        else:
            raise AttributeError(f"module 'gemmsmith' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "distributed", "runtime", "__version__"})
