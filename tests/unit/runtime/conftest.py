"""A kernel pack that needs no GPU: it implements the C ABI on the host."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from gemmsmith.runtime.abi import ABI_VERSION, OLDEST_ABI_VERSION, Arguments
from tuner.backends.cutlass import HEADERS

INCLUDE = HEADERS

SOURCE = r"""
#include <gemmsmith/abi.h>
static const char *names[] = {"first", "second"};
static int64_t seen;
GS_API int32_t gs_abi_version(void) { return ABI; }
#if ABI > 1
GS_API int32_t gs_abi_oldest(void) { return OLDEST; }
GS_API int32_t gs_arguments_bytes(void) { return BYTES; }
#endif
GS_API int32_t gs_kernel_count(void) { return 2; }
GS_API const char *gs_kernel_name(int32_t i) { return i >= 0 && i < 2 ? names[i] : 0; }
GS_API int32_t gs_kernel_describe(int32_t i, gs_kernel_info *info) {
  if (info->abi != GS_ABI_VERSION || info->size != sizeof *info) return GS_BAD_ABI;
  info->threads = 384; info->shared_bytes = 1000 + i; info->stages = 4;
  info->registers = -1; info->local_bytes = -1;
  return 0;
}
GS_API int32_t gs_can_implement(int32_t i, const gs_arguments *a) { return a->k % 8 ? 1 : 0; }
GS_API int64_t gs_workspace_bytes(int32_t i, const gs_arguments *a) {
  return a->k % 8 ? -1 : (int64_t)a->m * a->n * 4 * (a->splits > 1);
}
GS_API int32_t gs_run(int32_t i, const gs_arguments *a, void *workspace, void *stream) {
  if (a->abi != GS_ABI_VERSION) return GS_BAD_ABI;
  if (a->batch_stride_d != 77 || a->beta != 0.5f || a->sm_count != 132) return 1001;
  seen = (int64_t)workspace + (int64_t)stream;
  return seen == 30 ? 0 : 1002;
}
"""


def build_pack(
    folder: Path,
    name: str = "pack.so",
    *,
    abi: int = ABI_VERSION,
    oldest: int = OLDEST_ABI_VERSION,
    size: int = ctypes.sizeof(Arguments),
) -> Path:
    """A pack for the versions `oldest` to `abi`, which knows `size` bytes of arguments."""
    source = folder / f"{name}.c"
    source.write_text(SOURCE)
    path = folder / name
    subprocess.run(
        [
            *("gcc", "-shared", "-fPIC", f"-DABI={abi}", f"-DOLDEST={oldest}", f"-DBYTES={size}"),
            *(f"-I{INCLUDE}", str(source), "-o", str(path)),
        ],
        check=True,
    )
    return path


@pytest.fixture(scope="session")
def host_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_pack(tmp_path_factory.mktemp("pack"))
