"""A stand-in for nvcc: reads the unit, prints scripted messages, and may write an output.

`toolchain(directory, ...)` returns a Toolchain that uses it. Real compilations are in
tests/integration/test_compile.py.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from tuner.compile import Toolchain

_SCRIPT = """#!{python}
import hashlib, json, os, pathlib, subprocess, sys, time
orders = json.loads(pathlib.Path({orders!r}).read_text())
if "--version" in sys.argv:
    print(orders["version"])
    raise SystemExit(0)
with open(pathlib.Path({orders!r}).with_suffix(".calls"), "a") as calls:
    calls.write(str(os.getpid()) + "\\n")
output, source = pathlib.Path(sys.argv[-2]), pathlib.Path(sys.argv[-1]).read_text()
time.sleep(orders.get("each_s", 0))
def holds(name):
    return name + ">" in source or name + "," in source
if any(map(holds, orders["slow"])):
    helper = subprocess.Popen(["sleep", str(orders["seconds"])])
    # At once: several units may be slow, and each may be killed at any moment.
    begun = pathlib.Path({orders!r}).with_suffix("." + str(os.getpid()))
    begun.write_text(str(helper.pid))
    begun.rename(begun.with_suffix(".helper"))
    helper.wait()
bad = [name for name in orders["bad"] if holds(name)]
if bad:
    for name in bad:
        print(orders["message"].replace("NAME", name), file=sys.stderr)
    raise SystemExit(2)
output.write_bytes(b"\\x7fELF" + source.encode())
"""


def toolchain(
    directory: Path,
    *,
    bad: list[str] | None = None,
    message: str = "error: in NAME_mainloop: static assertion failed",
    slow: list[str] | None = None,
    seconds: float = 300.0,
    version: str = "Cuda compilation tools, release 13.0, V13.0.88",
    each_s: float = 0.0,
) -> Toolchain:
    """A toolchain whose nvcc rejects units with a kernel named in `bad`.

    A unit with a kernel named in `slow` first waits `seconds` for a helper process of nvcc. In
    addition, every unit takes `each_s` seconds.
    """
    directory.mkdir(parents=True, exist_ok=True)
    orders = directory / "orders.json"
    orders.write_text(
        json.dumps(
            {
                "bad": bad or [],
                "message": message,
                "slow": slow or [],
                "seconds": seconds,
                "version": version,
                "each_s": each_s,
            }
        )
    )
    nvcc = directory / "bin" / "nvcc"
    nvcc.parent.mkdir(exist_ok=True)
    nvcc.write_text(_SCRIPT.format(python=sys.executable, orders=str(orders)))
    nvcc.chmod(0o755)
    return existing_toolchain(directory)


def existing_toolchain(directory: Path) -> Toolchain:
    """The toolchain that this or another process has put into the folder."""
    nvcc = directory / "bin" / "nvcc"
    return Toolchain(nvcc=nvcc, version="13.0.88", origin="system", cutlass="4.2.0.0")


def calls(directory: Path) -> int:
    """The number of units that it has compiled or rejected."""
    path = directory / "orders.calls"
    return len(path.read_text().splitlines()) if path.exists() else 0


def busy(directory: Path) -> bool:
    """Whether it has begun a slow unit, so that its helper exists.

    A test that stops a build stops it then: on a loaded machine a compiler may be killed before it
    has begun anything.
    """
    return (directory / "orders.helper").exists()


def helper(directory: Path) -> int:
    """Process id of the helper that a slow unit waits for. Waits until the helper exists."""
    deadline = time.monotonic() + 30
    while not busy(directory):
        if time.monotonic() > deadline:
            raise TimeoutError("the stand-in was never asked for a slow unit")
        time.sleep(0.02)
    return int((directory / "orders.helper").read_text())
