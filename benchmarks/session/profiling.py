"""Nsight Compute on gemmsmith's winner and cuBLAS, one problem at a time: ncu-<problem>.csv.

The GPU's clocks are left alone, so times under ncu are no measurements; shares of peak and counts
are what it is for. The tables are cut down to a few columns.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence

from benchmarks.session.core import Session

LAUNCHES = 3
METRICS = (
    "gpu__time_duration.sum",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__bytes.sum",
    "lts__t_sectors.sum",
    "lts__t_sectors_op_read.sum",
    "lts__t_sectors_op_write.sum",
    "lts__t_sector_hit_rate.pct",
)
TENSOR_PREFIX = "sm__inst_executed_pipe_tensor"
"""Its counters differ from chip to chip: all there are, are taken."""
LAUNCH_METRICS = (
    "launch__waves_per_multiprocessor",
    "launch__registers_per_thread",
    "launch__shared_mem_per_block",
)
KEPT_COLUMNS = ("ID", "Kernel Name", "Block Size", "Grid Size")
NAME_LENGTH = 160


def profile(session: Session) -> int:
    """The problems of --problem, in every precision of the session."""
    program = _ncu()
    if program is None and not session.dry_run:
        print("ncu is not installed: nothing profiled", flush=True)
        return 1
    metrics = ",".join(_available(program, session))
    worst = 0
    for dtype in session.dtypes:
        for problem in session.problems:
            log = session.file("profile", ".log", dtype)
            driver = (
                *(sys.executable, "-m", "benchmarks.profile", *problem.split("x")),
                *("--dtype", dtype, "--launches", str(LAUNCHES)),
            )
            env = session.only_device()
            # Once without ncu: builds what is missing, and shows that it runs at all.
            code = session.command(*driver, log=log, env=env)
            if code:
                worst = worst or code
                continue
            raw = session.out / f"ncu-{problem}-{dtype}.raw"
            code = session.command(
                *(program or "ncu", "--csv", "--page", "raw", "--metrics", metrics),
                *("--clock-control", "none", "--profile-from-start", "off"),
                *("--target-processes", "application-only"),
                *("--force-overwrite", "--log-file", str(raw), *driver),
                log=log,
                env=env,
            )
            worst = worst or code
            if raw.exists():
                raw.with_suffix(".csv").write_text(shrunk(raw.read_text(errors="replace")))
                if code == 0:
                    raw.unlink()  # else it says what went wrong
    return worst


def chosen_metrics(listed: Iterable[str]) -> list[str]:
    """The wanted metrics among the base names that ncu lists; all of them if it lists none."""
    names = set(listed)
    tensor = sorted(name for name in names if name.startswith(TENSOR_PREFIX))
    wanted = [name for name in METRICS if not names or name.partition(".")[0] in names]
    counters = [f"{name}.sum" for name in tensor] or [f"{TENSOR_PREFIX}.sum"]
    return [*wanted, *(counters if names else counters[:1]), *LAUNCH_METRICS]


def shrunk(text: str) -> str:
    """ncu's table without its own messages, and with the columns that tell something."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.reader(lines))
    if not rows:
        return ""
    kept = [i for i, name in enumerate(rows[0]) if _tells(name)]
    output = []
    for row in rows:
        cells = [_short(row[i]) for i in kept if i < len(row)]
        output.append(",".join('"' + cell.replace('"', '""') + '"' for cell in cells))
    return "\n".join(output) + "\n"


def _tells(column: str) -> bool:
    """ncu adds every attribute of the device to what it was asked for."""
    asked = (*METRICS, *LAUNCH_METRICS)
    return column in KEPT_COLUMNS or column in asked or column.startswith(TENSOR_PREFIX)


def _short(cell: str) -> str:
    return cell if len(cell) <= NAME_LENGTH else f"{cell[:NAME_LENGTH]}…"


def _ncu() -> str | None:
    return shutil.which("ncu") or shutil.which("/usr/local/cuda/bin/ncu")


def _available(program: str | None, session: Session) -> Sequence[str]:
    if program is None or session.dry_run:
        return chosen_metrics(())
    try:
        done = subprocess.run(
            [program, "--query-metrics"], capture_output=True, text=True, timeout=120
        )
    except subprocess.TimeoutExpired:
        return chosen_metrics(())
    return chosen_metrics(re.findall(r"^([a-z0-9]+__\w+)", done.stdout, re.MULTILINE))


def problem_name(text: str) -> str:
    """Check `MxNxK`, or `MxNxKxG` of a grouped product.

    Raises:
        ValueError: it is something else.
    """
    if not re.fullmatch(r"\d+(x\d+){2,3}", text):
        raise ValueError(
            "a problem to profile is MxNxK, such as 256x4096x4096, or MxNxKxG of G groups, "
            f"not {text!r}"
        )
    return text
