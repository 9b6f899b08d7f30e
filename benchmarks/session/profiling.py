"""Nsight Compute on gemmsmith's winner and cuBLAS, problem by problem: ncu-<problem>.csv.

The GPU's clocks are not fixed, so use the shares of peak and the counts, not the times. The tables
are reduced to a few columns.
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
"""Prefix of the tensor cores' counters, which differ between chips; all of them are taken."""
LAUNCH_METRICS = (
    "launch__waves_per_multiprocessor",
    "launch__registers_per_thread",
    "launch__shared_mem_per_block",
)
KEPT_COLUMNS = ("ID", "Kernel Name", "Block Size", "Grid Size")
NAME_LENGTH = 160


def profile(session: Session) -> int:
    """Profile the problems of --problem, in every precision of the session."""
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
            # Once without ncu, to build a missing pack and to see that the program runs.
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
                    raw.unlink()  # after an error it is kept, because it has the message
    return worst


def chosen_metrics(listed: Iterable[str]) -> list[str]:
    """Return our metrics that are among the base names that ncu lists; all if it lists none."""
    names = set(listed)
    tensor = sorted(name for name in names if name.startswith(TENSOR_PREFIX))
    metrics = [name for name in METRICS if not names or name.partition(".")[0] in names]
    counters = [f"{name}.sum" for name in tensor] or [f"{TENSOR_PREFIX}.sum"]
    return [*metrics, *(counters if names else counters[:1]), *LAUNCH_METRICS]


def shrunk(text: str) -> str:
    """Remove messages from ncu's table, and all columns but a few."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.reader(lines))
    if not rows:
        return ""
    kept = [i for i, name in enumerate(rows[0]) if _is_kept(name)]
    output = []
    for row in rows:
        cells = [_short(row[i]) for i in kept if i < len(row)]
        output.append(",".join('"' + cell.replace('"', '""') + '"' for cell in cells))
    return "\n".join(output) + "\n"


def _is_kept(column: str) -> bool:
    # ncu adds columns of all attributes of the device.
    columns = (*KEPT_COLUMNS, *METRICS, *LAUNCH_METRICS)
    return column in columns or column.startswith(TENSOR_PREFIX)


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
    """Check that a text is `MxNxK`, or `MxNxKxG` for a grouped product.

    Raises:
        ValueError: it is not.
    """
    if not re.fullmatch(r"\d+(x\d+){2,3}", text):
        raise ValueError(
            "a problem to profile is MxNxK, such as 256x4096x4096, or MxNxKxG for G groups, "
            f"not {text!r}"
        )
    return text
