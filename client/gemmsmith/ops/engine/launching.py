"""Triton kernels, launched again for little of the host's time.

`kernel[grid](…)` inspects its arguments, its options and the environment at every call, to find the
compiled kernel that fits: most of its cost. Here callers pass tensors, numbers and constants apart.
So a short key finds the kernel, and Triton's own launcher runs it. If that may be wrong, as with
hooks of a profiler or another version of Triton, every launch takes the usual way.

If a kernel cannot be compiled, for example without a C compiler, torch's operators run instead.
During the capture of a CUDA graph nothing is compiled, because loading code may break the capture.

Only imported where there is a GPU: torch's builds for CUDA bring Triton.
"""

from __future__ import annotations

import logging
from typing import Any

# mypy: disable-error-code="attr-defined, no-untyped-call"
import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime import driver

from gemmsmith.errors import LaunchFailed

log = logging.getLogger("gemmsmith")

ALIGNMENT = 16
"""Bytes: Triton compiles a kernel for pointers that are multiples of this, and one for others."""

_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
_IS_KNOWN = (3, 6) <= _VERSION <= (3, 9)
"""Whether `JITFunction.run` ends in the launch that is repeated here; 3.10 is not out yet."""


class TritonKernel:
    """Decorates the result of `triton.jit`. A call launches it.

    Its arguments must come in this order: tensors, numbers named in `do_not_specialize`, constants.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._launches: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._compiled: dict[tuple[Any, ...], bool] = {}

    def __call__(
        self,
        programs: int,
        tensors: tuple[torch.Tensor, ...],
        *constants: float,
        numbers: tuple[int, ...] = (),
        warps: int = 4,
    ) -> None:
        """Launch that many programs on the current stream of the tensors' device.

        Args:
            programs: how many; 0 launches nothing.
            tensors: all on one device.
            constants: the arguments that are `tl.constexpr`.
            numbers: below 2³¹.
            warps: of a program.

        Raises:
            LaunchFailed: it cannot be compiled, or not now.
        """
        if not programs:
            return
        device = tensors[0].get_device()
        # Everything that Triton compiles for, and the device on which the kernel is loaded.
        key = (
            device,
            warps,
            constants,
            *[tensor.dtype for tensor in tensors],
            *[tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors],
        )
        known = self._launches.get(key)
        is_there = device == torch.cuda.current_device()  # switching costs the host
        if known is None or not is_there or _are_hooked():
            if not self._compiled.get(key, not torch.cuda.is_current_stream_capturing()):
                raise LaunchFailed("this kernel cannot be compiled, or not during a capture")
            try:
                made = self._usual(programs, tensors, numbers, constants, warps, is_there=is_there)
            except Exception as error:
                if key in self._compiled:  # it ran before, so the compiler is not at fault
                    raise
                self._give_up(key, error)
                raise LaunchFailed("this kernel cannot be compiled") from error
            self._compiled[key] = True
            if _IS_KNOWN and isinstance(made, CompiledKernel):  # the interpreter gives none
                self._launches[key] = made.run, made.function, made.packed_metadata
            return
        run, function, metadata = known
        stream = driver.active.get_current_stream(device)
        no_hooks = (None, None, None)
        grid = (programs, 1, 1)
        run(*grid, stream, function, metadata, *no_hooks, *tensors, *numbers, *constants)

    def _give_up(self, key: tuple[Any, ...], error: Exception) -> None:
        """Leave this to torch from now on, and log why, once for each kernel."""
        if all(tuple(self._compiled.values())):
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            name = getattr(self._function, "__name__", "?")
            log.warning("torch's own operators run instead of Triton's kernel %s: %s", name, reason)
        self._compiled[key] = False

    def _usual(
        self,
        programs: int,
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[int, ...],
        constants: tuple[float, ...],
        warps: int,
        *,
        is_there: bool,
    ) -> Any:
        """Launch by Triton. Returns the kernel that it compiled."""
        launch = self._function[(programs,)]
        if is_there:
            return launch(*tensors, *numbers, *constants, num_warps=warps)
        with torch.cuda.device_of(tensors[0]):
            return launch(*tensors, *numbers, *constants, num_warps=warps)


def quotient_up(number: int, divisor: int) -> int:
    """The quotient, rounded up: `triton.cdiv`, which costs the host 2 µs (Triton 3.6)."""
    return -(-number // divisor)


def power_of_2(number: int) -> int:
    """The next power of 2: `triton.next_power_of_2`, which costs the host as much."""
    return 1 << (number - 1).bit_length()


def _are_hooked() -> bool:
    knobs = triton.knobs.runtime
    enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
