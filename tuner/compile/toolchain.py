"""Where nvcc is and how it is called.

The compiler of the installed Python wheels comes first, because the project is tested with its
version; the system's (`CUDA_HOME`, `CUDA_PATH`, `PATH`, /usr/local/cuda) comes second. A
toolchain's digest covers what decides its output, and no paths, so that packs which the same
compiler built on another machine match.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tuner.arch import SM90, Architecture, architecture
from tuner.backends.cutlass import HEADERS
from tuner.backends.cutlass.package import include_dirs
from tuner.backends.cutlass.package import version as cutlass_version
from tuner.errors import CompilerNotFound
from tuner.extras import pip_install

OLDEST_NVCC = (12, 8)
"""Older compilers lack headers that CUTLASS 4.2 includes."""

FLAGS = (
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    # CuTe calls constexpr host functions from device code.
    "--expt-relaxed-constexpr",
    # CUTLASS's own warnings are many, and would hide the errors.
    "-w",
    # A pack exports only the C ABI, so that any number of packs load into one process.
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    "-Xlinker=--exclude-libs,ALL,-s",
    "-shared",
    # A pack needs only the driver, and does not depend on the CUDA runtime that torch loads.
    "-cudart=static",
    "-Xfatbin=-compress-all",
)
"""Flags for every architecture, which adds its own (`Architecture.target_flags`)."""

_STANDARD_NVCC = Path("/usr/local/cuda/bin/nvcc")
_RELEASE = re.compile(r"\bV(\d+)\.(\d+)\.(\d+)")
_WHEEL_PARTS = (
    ("bin/ptxas", "nvidia-cuda-nvcc"),
    ("nvvm/bin/cicc", "nvidia-nvvm"),
    ("include/crt/host_config.h", "nvidia-cuda-crt"),
    ("include/cuda_runtime.h", "nvidia-cuda-runtime"),
    ("lib/libcudart_static.a", "nvidia-cuda-runtime"),
    ("include/cccl/cuda/std/utility", "nvidia-cuda-cccl"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Toolchain:
    """An nvcc that can build packs, for one architecture.

    Attributes:
        version: nvcc's full release, such as `13.0.88`.
        origin: `wheels` or `system`.
        arch: the architecture to build for.
        flags: all other options that decide the output; no paths.
        search: `-I` and `-L` options, which are not part of the digest.
        cutlass: CUTLASS's release.
    """

    nvcc: Path
    version: str
    origin: str
    arch: Architecture = SM90
    flags: tuple[str, ...] = FLAGS
    search: tuple[str, ...] = ()
    cutlass: str = ""

    @property
    def digest(self) -> str:
        """Hash of what decides the output beside a kernel's text: releases and flags."""
        # Not the host compiler, which compiles only the few host functions behind the C ABI.
        text = "\0".join([self.version, *self._options, self.cutlass])
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def _options(self) -> tuple[str, ...]:
        return (*self.flags, *self.arch.target_flags)

    def targeting(self, arch: str) -> Toolchain:
        """The same nvcc for another architecture.

        Raises:
            NoLegalCandidate: there are no kernels for it.
        """
        return self if arch == self.arch.name else replace(self, arch=architecture(arch))

    def command(self, source: Path, output: Path, *include: Path) -> list[str]:
        """The command line that compiles one unit into a pack; `include` is searched first."""
        first = [f"-I{folder}" for folder in include]
        return [
            str(self.nvcc),
            *self._options,
            *first,
            *self.search,
            "-o",
            str(output),
            str(source),
        ]


def find_toolchain(*, wheels_only: bool = False) -> Toolchain:
    """The first usable nvcc: of the installed wheels, else, unless `wheels_only`, of the system.

    Raises:
        CompilerNotFound: there is no usable nvcc, or no host g++; the message lists the compilers
            that were tried.
    """
    _check_host_compiler()
    tried: list[str] = []
    for nvcc, origin in _candidates(wheels_only=wheels_only):
        root = nvcc.parent.parent
        missing = {wheel for part, wheel in _WHEEL_PARTS if not (root / part).exists()}
        if missing and origin == "wheels":
            tried.append(f"{nvcc} (lacks the wheels {', '.join(sorted(missing))})")
            continue
        version = _version(nvcc)
        if version is None:
            tried.append(f"{nvcc} (does not run)")
        elif version[:2] < OLDEST_NVCC:
            tried.append(f"{nvcc} ({'.'.join(map(str, version))} is too old)")
        else:
            return Toolchain(
                nvcc=nvcc,
                version=".".join(map(str, version)),
                origin=origin,
                search=_search_options(root if origin == "wheels" else None),
                cutlass=cutlass_version(),
            )
    detail = f" Found but unusable: {'; '.join(tried)}." if tried else ""
    raise CompilerNotFound(
        f"no nvcc ≥ {'.'.join(map(str, OLDEST_NVCC))}.{detail} "
        f"Run `{pip_install('compiler')}`, or install CUDA 13 and set CUDA_HOME."
    )


def _check_host_compiler() -> None:
    name = os.environ.get("NVCC_CCBIN", "g++")
    if shutil.which(name) is None:
        raise CompilerNotFound(
            f"no host compiler: {name} is not on PATH, and nvcc needs one. "
            "Install it (Debian and Ubuntu: `apt install g++`)."
        )


def _candidates(*, wheels_only: bool) -> Iterator[tuple[Path, str]]:
    for root in _wheel_roots():
        if (root / "bin" / "nvcc").is_file():
            yield root / "bin" / "nvcc", "wheels"
    if wheels_only:
        return
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    on_path = shutil.which("nvcc")
    seen: set[Path] = set()
    for nvcc in [
        *(Path(home) / "bin" / "nvcc" for home in homes if home),
        *([Path(on_path)] if on_path else []),
        _STANDARD_NVCC,
    ]:
        if nvcc.is_file() and nvcc.resolve() not in seen:
            seen.add(nvcc.resolve())
            yield nvcc, "system"


def _wheel_roots() -> list[Path]:
    """`nvidia/cu13` of every installed part of the `nvidia` namespace, the newest major first."""
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec else None
    roots = [root for place in places or [] for root in Path(place).glob("cu[0-9]*")]
    return sorted(roots, key=lambda root: int(re.sub(r"\D", "", root.name) or 0), reverse=True)


def _version(nvcc: Path) -> tuple[int, int, int] | None:
    try:
        done = subprocess.run(
            [str(nvcc), "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    release = _RELEASE.search(done.stdout)
    return (int(release[1]), int(release[2]), int(release[3])) if release else None


def _search_options(wheels_root: Path | None) -> tuple[str, ...]:
    options = [f"-I{path}" for path in (HEADERS, *include_dirs())]
    if wheels_root is not None:
        # nvcc searches lib64, as a CUDA toolkit has it; the wheels have lib.
        options.append(f"-L{wheels_root / 'lib'}")
    return tuple(options)
