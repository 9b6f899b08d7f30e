"""Writes the files that plugins make for a unit, then becomes the unit's compiler.

A program, started with the unit's directory, which holds the unit's kernels in `kernels.json`, and
with the compiler's command. So the plugins' own compilers run where nvcc does: with its limits, and
with its output.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import msgspec

from gemmsmith.core.kernel import AnyKernel, PluginKernel
from tuner.backends.plugin.backend import PluginBackend
from tuner.backends.registry import backend_of


def main(directory: Path, compiler: list[str]) -> None:
    content = (directory / "kernels.json").read_bytes()
    for kernel in msgspec.json.decode(content, type=list[AnyKernel]):
        backend = backend_of(kernel)
        if not isinstance(kernel, PluginKernel) or not isinstance(backend, PluginBackend):
            continue
        try:
            files = backend.files(kernel)
        except Exception as error:  # noqa: BLE001 - recorded as the reason of a failed trial
            traceback.print_exc()
            sys.exit(f"error: {kernel.name}: {type(error).__name__}: {error}")
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")
    os.execv(compiler[0], compiler)  # noqa: S606 - the tuner's own command


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
