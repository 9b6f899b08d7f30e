"""gemmsmith: look up the fastest GEMM kernel, and run it from PyTorch.

Importing this module is cheap, because every name below is imported on first use. A program that
only builds problems does not load an HTTP client, and a program that only looks up winners does not
load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gemmsmith import moved

if TYPE_CHECKING:  # the names of `_MODULES`, for type checkers
    from gemmsmith import distributed as distributed
    from gemmsmith import runtime as runtime
    from gemmsmith.answers.answer import Answer as Answer
    from gemmsmith.answers.answer import Conditions as Conditions
    from gemmsmith.answers.answer import Correctness as Correctness
    from gemmsmith.answers.answer import Ratio as Ratio
    from gemmsmith.answers.answer import Statistics as Statistics
    from gemmsmith.answers.answer import TunedAnswer as TunedAnswer
    from gemmsmith.answers.history import Origin as Origin
    from gemmsmith.answers.history import Revision as Revision
    from gemmsmith.answers.snapshot import Choice as Choice
    from gemmsmith.answers.snapshot import Snapshot as Snapshot
    from gemmsmith.core.bounds import Bounds as Bounds
    from gemmsmith.core.candidate import Candidate as Candidate
    from gemmsmith.core.config import Config as Config
    from gemmsmith.core.config import Match as Match
    from gemmsmith.core.config import Use as Use
    from gemmsmith.core.device import DeviceModel as DeviceModel
    from gemmsmith.core.device import Environment as Environment
    from gemmsmith.core.kernel import CublasLtKernel as CublasLtKernel
    from gemmsmith.core.kernel import CuteKernel as CuteKernel
    from gemmsmith.core.kernel import Cutlass2xKernel as Cutlass2xKernel
    from gemmsmith.core.kernel import Cutlass3xKernel as Cutlass3xKernel
    from gemmsmith.core.kernel import Kernel as Kernel
    from gemmsmith.core.launch import Launch as Launch
    from gemmsmith.core.operation import DType as DType
    from gemmsmith.core.operation import Element as Element
    from gemmsmith.core.operation import Layout as Layout
    from gemmsmith.core.operation import Operation as Operation
    from gemmsmith.core.problem import Problem as Problem
    from gemmsmith.core.tuning import Effort as Effort
    from gemmsmith.core.tuning import JobState as JobState
    from gemmsmith.errors import Busy as Busy
    from gemmsmith.errors import Forbidden as Forbidden
    from gemmsmith.errors import GemmsmithError as GemmsmithError
    from gemmsmith.errors import InvalidProblem as InvalidProblem
    from gemmsmith.errors import JobCancelled as JobCancelled
    from gemmsmith.errors import JobFailed as JobFailed
    from gemmsmith.errors import LaunchFailed as LaunchFailed
    from gemmsmith.errors import NotInvariant as NotInvariant
    from gemmsmith.errors import NotTuned as NotTuned
    from gemmsmith.errors import NotUnderstood as NotUnderstood
    from gemmsmith.errors import PackCorrupt as PackCorrupt
    from gemmsmith.errors import PackError as PackError
    from gemmsmith.errors import PackIncompatible as PackIncompatible
    from gemmsmith.errors import PackUntrusted as PackUntrusted
    from gemmsmith.errors import Rejected as Rejected
    from gemmsmith.errors import ServiceError as ServiceError
    from gemmsmith.errors import ServiceFault as ServiceFault
    from gemmsmith.errors import ServiceUnavailable as ServiceUnavailable
    from gemmsmith.errors import SnapshotCorrupt as SnapshotCorrupt
    from gemmsmith.errors import SnapshotUnavailable as SnapshotUnavailable
    from gemmsmith.errors import Unauthorized as Unauthorized
    from gemmsmith.http.aio import AsyncClient as AsyncClient
    from gemmsmith.http.aio import AsyncTuningJob as AsyncTuningJob
    from gemmsmith.http.client import Client as Client
    from gemmsmith.http.handles import TuningJob as TuningJob
    from gemmsmith.http.jobs import JobEvent as JobEvent
    from gemmsmith.http.jobs import JobStatus as JobStatus
    from gemmsmith.ops import InvarianceReport as InvarianceReport
    from gemmsmith.ops import Shapes as Shapes
    from gemmsmith.ops import capture as capture
    from gemmsmith.ops import check_invariance as check_invariance
    from gemmsmith.ops import compare as compare
    from gemmsmith.ops import grouped_mm as grouped_mm
    from gemmsmith.ops import int8_mm as int8_mm
    from gemmsmith.ops import linear as linear
    from gemmsmith.ops import matmul as matmul
    from gemmsmith.ops import patch as patch
    from gemmsmith.ops import scaled_mm as scaled_mm
    from gemmsmith.ops import unpatch as unpatch
    from gemmsmith.ops import use as use
    from gemmsmith.ops.graphs.inductor import inductor_pass as inductor_pass
    from gemmsmith.ops.products.feedforward import mlp as mlp
    from gemmsmith.ops.products.gated import gated_linear as gated_linear
    from gemmsmith.ops.products.losses import linear_cross_entropy as linear_cross_entropy
    from gemmsmith.ops.products.mixture import experts as experts
    from gemmsmith.ops.products.newton_schulz import newton_schulz as newton_schulz
    from gemmsmith.ops.products.scaled import scaled_gated_linear as scaled_gated_linear
    from gemmsmith.ops.products.scaled import scaled_linear as scaled_linear
    from gemmsmith.winners.bundle import Bundle as Bundle
    from gemmsmith.winners.lookup import Lookup as Lookup
    from gemmsmith.winners.packs import Packs as Packs

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
        "NotInvariant",
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
    "ops.products.losses": ("linear_cross_entropy",),
    "ops.products.mixture": ("experts",),
    "ops.products.newton_schulz": ("newton_schulz",),
    "ops.products.scaled": ("scaled_gated_linear", "scaled_linear"),
    "core.operation": ("DType", "Element", "Layout", "Operation"),
    "winners.packs": ("Packs",),
    "core.problem": ("Problem",),
    "answers.snapshot": ("Choice", "Snapshot"),
    "core.tuning": ("Effort", "JobState"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_HOME)


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
