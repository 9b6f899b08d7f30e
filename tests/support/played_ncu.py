"""A program that is called as `ncu` is, and writes a table that Nsight Compute has written.

It runs nothing: the order names the contestant, and the table is the part of a recorded one that
has that contestant's launches. Counters that the recorded tables lack are added: stalls, occupancy
and pipes, whose numbers are invented and whose columns are ncu's.
"""

from __future__ import annotations

import csv
import io
import stat
import sys
from pathlib import Path

from tests.support.docs import ROOT

TABLES = ROOT / "benchmarks" / "results"
SHORT_K = TABLES / "2026-11-21-h200-ncu-1024x2304x768-bf16.csv"
ADDED = {
    "sm__cycles_elapsed.avg.per_second": ("cycle/nsecond", "1.53"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("%", "18.31"),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": ("%", "61.20"),
    "sm__inst_issued.avg.pct_of_peak_sustained_active": ("%", "9.44"),
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": ("%", "33.02"),
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": ("inst", "6.25"),
    "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio": ("inst", "12.50"),
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": ("inst", "5.00"),
    "smsp__average_warps_issue_stalled_selected_per_issue_active.ratio": ("inst", "1"),
    "smsp__average_warps_issue_stalled_membar_per_issue_active.ratio": ("inst", "0"),
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": ("inst", "0.25"),
}

_PROGRAM = """#!{python}
import sys
sys.path[:0] = {path!r}
from tests.support.played_ncu import played
played(sys.argv[1:], {state!r})
"""


def install(folder: Path, state: str = "") -> Path:
    """Put the program into a folder as `ncu`.

    `state` is `no rights`, `fails` or `other kernels` for a program that ends so.
    """
    program = folder / "ncu"
    path = [str(ROOT), str(ROOT / "client")]
    program.write_text(_PROGRAM.format(python=sys.executable, path=path, state=state))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def table(name: str, *, source: Path = SHORT_K) -> str:
    """The rows of a contestant, with the columns of ADDED."""
    heads, units, *rows = csv.reader(io.StringIO(source.read_text()))
    kernel = heads.index("Kernel Name")
    ours = [row for row in rows if "cutlass" in row[kernel]]
    rows = [row for row in rows if row not in ours] if name == "default" else ours
    heads, units = [*heads, *ADDED], [*units, *(unit for unit, _ in ADDED.values())]
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    added = [value for _, value in ADDED.values()]
    writer.writerows([heads, units, *([*row, *added] for row in rows)])
    return f"==PROF== Connected to process 123\n{text.getvalue()}==PROF== Disconnected\n"


def played(words: list[str], state: str) -> None:
    """What ncu does with these arguments."""
    import json

    if words == ["--version"]:
        print("NVIDIA (R) Nsight Compute Command Line Profiler\nVersion 2025.3.1.0 (build 1)")
        return
    if words == ["--query-metrics"]:
        print(
            "Device NVIDIA H200 (GH100)\n" + "\n".join(f"{n.partition('.')[0]}  #" for n in LISTED)
        )
        return
    log = Path(words[words.index("--log-file") + 1])
    order = json.loads(words[-1])
    if state == "no rights":
        log.write_text("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n")
        sys.exit(1)
    if state == "fails":
        log.write_text("==ERROR== The application returned an error code (1).\n")
        print("CUDA out of memory", file=sys.stderr)
        sys.exit(1)
    [contestant] = order["contestants"]
    text = table(contestant["name"])
    if state == "other kernels":
        text = "\n".join(text.splitlines()[:-2])
    log.write_text(text)
    names = ("gpu_uuid", "driver", "cuda", "cutlass", "compiler", "torch", "cublas", "gemmsmith")
    Path(order["environment"]).write_text(json.dumps(dict.fromkeys(names, "played")))


LISTED = (
    "gpu__time_duration.sum",
    "dram__bytes.sum",
    "dram__throughput.avg",
    "lts__t_sectors.sum",
    "sm__throughput.avg",
    *ADDED,
    "smsp__average_warps_issue_stalled_wait_not_issued_per_issue_active.ratio",
)
