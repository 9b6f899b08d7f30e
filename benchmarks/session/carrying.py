"""Compiled packs as one archive in parts, to carry them from one host to the next.

Packs share nearly all their host code. Compressed together, with a window that spans hundreds of
packs, they take a tenth of their bytes.
"""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path
from typing import IO

NAME = "packs.tar.zst"
PART_BYTES = 15 * 2**20
"""Hosts give back files of 16 MiB at most."""

_WINDOW_LOG = 27
_LEVEL = 12


def write(store: Path, target: Path, site: Path) -> int:
    """Write the packs of `store` to `target`, as packs.tar.zst.00, .01, …

    `site` is the folder of carried Python packages, which a session's own process does not import.
    """
    sys.path.insert(0, str(site))
    import zstandard

    parameters = zstandard.ZstdCompressionParameters.from_level(
        _LEVEL, window_log=_WINDOW_LOG, enable_ldm=True, threads=-1
    )
    packed = io.BytesIO()
    manifests = sorted(store.glob("*.json"))
    with (
        zstandard.ZstdCompressor(compression_params=parameters).stream_writer(
            packed, closefd=False
        ) as stream,
        tarfile.open(fileobj=stream, mode="w|") as tar,
    ):
        for manifest in manifests:
            for path in (manifest.with_suffix(".so"), manifest):
                tar.add(path, arcname=path.name)
    data = packed.getbuffer()
    for number, begin in enumerate(range(0, len(data), PART_BYTES)):
        part = target / f"{NAME}.{number:02}"
        part.write_bytes(data[begin : begin + PART_BYTES])
    print(f"{len(manifests)} packs, {len(data) / 1e6:.1f} MB", flush=True)
    return 0


def unpack(carried: Path, store: Path, site: Path) -> None:
    """Unpack carried parts into `store`; packs that are there already stay.

    `site` as for `write`.
    """
    parts = sorted(carried.glob(f"{NAME}.*"))
    if not parts:
        return
    sys.path.insert(0, str(site))
    import zstandard

    print(f"unpacking {len(parts)} parts of {NAME}", flush=True)
    data: IO[bytes] = io.BytesIO(b"".join(part.read_bytes() for part in parts))
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**_WINDOW_LOG)
    with (
        decompressor.stream_reader(data) as stream,
        tarfile.open(fileobj=stream, mode="r|") as tar,
    ):
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # new in Python 3.11.4
        for member in tar:
            # Overwriting a pack that another session has loaded would change its mapped memory,
            # and that process would crash.
            if not (store / member.name).exists():
                tar.extract(member, store)
