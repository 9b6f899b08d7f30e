"""A kernel pack without a GPU: the C ABI, implemented on the host."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tuner.backends.cutlass import HEADERS

INCLUDE = HEADERS

SOURCE = r"""
#include <gemmsmith/abi.h>
static const char *names[] = {"first", "second"};
static int64_t seen;
GS_API int32_t gs_abi_version(void) { return ABI; }
GS_API int32_t gs_kernel_count(void) { return 2; }
GS_API const char *gs_kernel_name(int32_t i) { return i >= 0 && i < 2 ? names[i] : 0; }
GS_API int32_t gs_kernel_describe(int32_t i, gs_kernel_info *info) {
  if (info->abi != GS_ABI_VERSION) return GS_BAD_ABI;
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


def build_pack(folder: Path, name: str = "pack.so", abi: int = 1) -> Path:
    source = folder / f"{name}.c"
    source.write_text(SOURCE)
    path = folder / name
    subprocess.run(
        ["gcc", "-shared", "-fPIC", f"-DABI={abi}", f"-I{INCLUDE}", str(source), "-o", str(path)],
        check=True,
    )
    return path


@pytest.fixture(scope="session")
def host_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_pack(tmp_path_factory.mktemp("pack"))
