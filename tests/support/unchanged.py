"""Starts programs that do not use gemmsmith, as if it were installed in their environment.

A `sitecustomize` reads `gemmsmith.pth`, so it need not be installed. With `counting`, launches are
counted. With `stand_in`, in addition, torch initializes CUDA without devices when it is imported,
and kernels in C run on the CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.docs import ROOT

PTH = ROOT / "client" / "gemmsmith.pth"

START = f"""
import pathlib
exec(pathlib.Path({str(PTH)!r}).read_text())
"""

COUNT = """
import atexit, os, pathlib, sys
import gemmsmith.startup.hook

begin = gemmsmith.startup.hook._begin

def pretend():
    begin()

def ready():
    from tests.gpu.support.counting import launches
    global counting
    counting = launches()  # until the end
    counted = counting.__enter__()
    file = pathlib.Path(__file__).with_name("launched-" + os.environ.get("RANK", "0"))
    atexit.register(lambda: file.write_text(
        "\\n".join(f"{plan.shape.problem} {plan.config.kernel.name}" for plan in counted)))
    pretend()

command = " ".join(sys.orig_argv)
if "spawn_main" in command:
    # A loader's worker, which uses no device: what is really done there.
    file = pathlib.Path(__file__).with_name(f"worker-{os.getpid()}")
    names = ("torch", "gemmsmith.startup.hook", "gemmsmith.ops")
    atexit.register(lambda: file.write_text(
        " ".join(name for name in names if name in sys.modules)))
elif os.environ.get("GEMMSMITH") and "torchrun" not in command:
    gemmsmith.startup.hook._begin = ready
"""

STAND_IN = """
def pretend():
    import torch
    from gemmsmith.ops import autouse
    from tests.support.stand_in import ENGINE
    autouse.Engine = ENGINE
    from gemmsmith.ops.products import layer
    layer.LAYER_FLOPS = 0  # small layers run kernels in training, too
    begin()
    # torch's own way of initializing CUDA, its lock held, but for CUDA.
    torch._C._cuda_init = lambda: None
    torch._C._cuda_getDeviceCount = lambda: 0
    torch.cuda._cudart = torch
    del torch.cuda._queued_calls[:2]  # looks at the devices
    torch.cuda._lazy_init()
    del torch._C._cuda_getDeviceCount
"""


def environment(
    folder: Path, *, counting: bool = False, stand_in: bool = False, **variables: str
) -> dict[str, str]:
    """Variables for a program. Writes the `sitecustomize` to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(
        START + COUNT * (counting or stand_in) + STAND_IN * stand_in
    )
    scripts = sysconfig.get_path("scripts")
    inherited = os.environ.get("PYTHONPATH")  # GPU hosts have the packages there
    return {
        **{name: value for name, value in os.environ.items() if name != "GEMMSMITH"},
        "PYTHONPATH": os.pathsep.join(
            [str(folder), str(ROOT / "client"), str(ROOT), *filter(None, [inherited])]
        ),
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        **variables,
    }


def launched(folder: Path, rank: int = 0) -> list[str]:
    """Problem and kernel of every launch of a rank, after the program's end."""
    return (folder / f"launched-{rank}").read_text().splitlines()


def run(
    words: Sequence[str | Path], folder: Path, environment: Mapping[str, str], within_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a program in `folder` to its end; `python` is this interpreter."""
    command = [sys.executable if word == "python" else str(word) for word in words]
    return subprocess.run(
        command, cwd=folder, env=dict(environment), capture_output=True, text=True,
        timeout=within_s, check=False,
    )  # fmt: skip
