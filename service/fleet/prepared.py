"""What a GPU of a fleet has in the compiler's place: kernels are built already, or asked for.

A run that needs a kernel which is not there ends with `KernelsWanted`; its trials stay. The job is
handed back, compilers somewhere build the kernels, and the GPU measures another job meanwhile.
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
    """Gives the kernels that are built; compiles none.

    Attributes:
        failures: why kernels cannot be built, by name: what the compilers said of them.
        later: names of kernels that count as not built, though they may be. Of a job that has a
            winner among the others: so its second look is at these, as it was when it asked.
    """

    def __init__(self, artifacts: ArtifactStore, toolchain: Toolchain, records: Store) -> None:
        super().__init__(artifacts, toolchain, records)
        self.failures: Mapping[str, str] = {}
        self.later: Collection[str] = ()

    def has(self, kernel: AnyKernel) -> bool:
        """See `Builder.has`."""
        return kernel.name not in self.later and super().has(kernel)

    def build(self, kernels: Sequence[AnyKernel]) -> Iterator[Built]:
        """See `Builder.build`.

        Raises:
            KernelsWanted: at least one is neither built nor known to fail.
        """
        here, missing = [], []
        for kernel in {kernel.name: kernel for kernel in kernels}.values():
            if (reason := self.failures.get(kernel.name)) is not None:
                failure = Failure(kind=FailureKind.COMPILE, message=reason)
                yield Built(kernel=kernel, failure=failure)
            elif not compiles(kernel) or self._find(kernel) is not None:
                here.append(kernel)
            else:
                missing.append(kernel)
        if missing:
            raise KernelsWanted(missing)
        yield from super().build(here)
