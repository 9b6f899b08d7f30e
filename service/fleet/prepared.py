"""The builder of a fleet's GPU: it uses kernels that are compiled, and requests the others.

A run that needs a kernel that is not compiled ends with `KernelsWanted`; its trials are kept. The
job is handed back, the fleet's compilers build the kernels, and the GPU measures another job
meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from gemmsmith.core.kernel import AnyKernel
from service.worker.builder import RecordingBuilder
from tuner.backends import compiles
from tuner.compile import ArtifactStore, Built, Toolchain
from tuner.errors import TunerError
from tuner.store import Store
from tuner.trial import Failure, FailureKind


class KernelsWanted(TunerError):
    """A run cannot go on before these kernels are compiled."""

    def __init__(self, kernels: Sequence[AnyKernel]) -> None:
        super().__init__(f"{len(kernels)} kernels are to be compiled")
        self.kernels = kernels


class PreparedBuilder(RecordingBuilder):
    """Yields kernels that are compiled, and compiles none.

    Attributes:
        failures: the compilers' errors, by the names of kernels that cannot be built.
        later: names of kernels that count as not compiled, even if they are. A run first promotes a
            winner among the compiled kernels, and may then request others for a second look. When
            the job comes back, these must again be left to the second look.
    """

    def __init__(self, artifacts: ArtifactStore, toolchain: Toolchain, records: Store) -> None:
        super().__init__(artifacts, toolchain, records)
        self.failures: Mapping[str, str] = {}
        self.later: Collection[str] = ()

    def has(self, kernel: AnyKernel) -> bool:
        return kernel.name not in self.later and super().has(kernel)

    def build(self, kernels: Sequence[AnyKernel]) -> Iterator[Built]:
        """See `Builder.build`.

        Raises:
            KernelsWanted: at least one is neither compiled nor known to fail.
        """
        compiled, missing = [], []
        for kernel in {kernel.name: kernel for kernel in kernels}.values():
            if (reason := self.failures.get(kernel.name)) is not None:
                failure = Failure(kind=FailureKind.COMPILE, message=reason)
                yield Built(kernel=kernel, failure=failure)
            elif not compiles(kernel) or self._find(kernel) is not None:
                compiled.append(kernel)
            else:
                missing.append(kernel)
        if missing:
            raise KernelsWanted(missing)
        yield from super().build(compiled)
