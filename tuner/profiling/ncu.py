"""Nsight Compute's command line, and its table of counters.

The clocks are left as they are: fixing them needs rights, and would show another kernel's balance
than the one in use. The counters of tensor pipes and of stalls differ between architectures, so
only those that `ncu --query-metrics` lists are taken.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from statistics import median

import msgspec

from tuner.profiling.records import Counters

_PLAIN = {
    "us": ("gpu__time_duration.sum",),
    "clock_mhz": ("sm__cycles_elapsed.avg.per_second", "smsp__cycles_elapsed.avg.per_second"),
    "waves": ("launch__waves_per_multiprocessor",),
    "registers": ("launch__registers_per_thread",),
    "shared_bytes": ("launch__shared_mem_per_block",),
    "dram_bytes": ("dram__bytes.sum",),
}
_SHARES = {
    "occupancy": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "tensor": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    ),
    "issue": (
        "sm__inst_issued.avg.pct_of_peak_sustained_active",
        "smsp__issue_active.avg.pct_of_peak_sustained_active",
    ),
    "sm": ("sm__throughput.avg.pct_of_peak_sustained_elapsed",),
    "l2": ("lts__throughput.avg.pct_of_peak_sustained_elapsed",),
    "dram": (
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    ),
}
"""Metrics by what they mean; of several, the first that is there counts."""
_COUNTS = ("registers", "shared_bytes", "l2_bytes", "dram_bytes")
_SECTORS = "lts__t_sectors.sum"
_SECTOR_BYTES = 32
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active(?:\.ratio)?")
REASONS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "lg_throttle",
    "long_scoreboard", "math_pipe_throttle", "membar", "mio_throttle", "no_instruction",
    "not_selected", "selected", "short_scoreboard", "sleeping", "wait",
)  # fmt: skip
"""Those of Hopper, if ncu lists no metrics."""
_LEAST_STALL = 0.005
"""Cycles; shorter waits are not kept."""
_LONGEST_NAME = 160
"""Characters; torch's grouped kernels have names of 2,000."""
_UNITS = {
    "ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3,
    "s": 1e6, "second": 1e6,
    "hz": 1e-6, "khz": 1e-3, "mhz": 1.0, "ghz": 1e3, "cycle/second": 1e-6, "cycle/usecond": 1.0,
    "cycle/nsecond": 1e3, "cycle/s": 1e-6, "cycle/us": 1.0, "cycle/ns": 1e3,
    "byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9,
    "%": 0.01,
}  # fmt: skip
"""Factors to microseconds, MHz, bytes and shares. ncu chooses the unit by the value."""


def find_ncu() -> str | None:
    """The program, on the path or where CUDA puts it."""
    return shutil.which("ncu") or shutil.which("/usr/local/cuda/bin/ncu")


def version(program: str) -> str:
    """Such as `ncu 2025.3.1.0`."""
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    number = re.search(r"Version (\d[\d.]*)", done.stdout)
    return f"ncu {number[1]}" if number else "ncu"


def listed(program: str) -> list[str]:
    """The base names of the metrics that this GPU has; [] if ncu does not say."""
    try:
        done = subprocess.run(
            [program, "--query-metrics"], capture_output=True, text=True, timeout=120, check=False
        )
    except subprocess.TimeoutExpired:
        return []
    return re.findall(r"^([a-z0-9]+__\w+)", done.stdout, re.MULTILINE)


def metrics(names: Iterable[str]) -> list[str]:
    """The metrics to take, of the base names that ncu lists; the usual ones if it lists none."""
    known = {*names}
    chosen = [_SECTORS]
    for choices in (*_PLAIN.values(), *_SHARES.values()):
        fitting = [name for name in choices if _base(name) in known]
        # What follows from the launch alone is not listed.
        chosen.append(fitting[0] if fitting else choices[0])
    reasons = [match[1] for name in sorted(known) if (match := _STALL.fullmatch(name))]
    issued = [reason for reason in reasons if not reason.endswith("_not_issued")]
    stalls = [f"smsp__average_warps_issue_stalled_{r}_per_issue_active" for r in issued or REASONS]
    if known:
        chosen = [name for name in chosen if name.startswith("launch__") or _base(name) in known]
    return [*chosen, *(f"{name}.ratio" for name in stalls)]


def _base(name: str) -> str:
    return name.partition(".")[0]


def command(program: str, taken: Sequence[str], table: Path) -> tuple[str, ...]:
    """The words before those of a program whose kernels are counted; the table goes to a file."""
    return (
        *(program, "--csv", "--page", "raw", "--metrics", ",".join(taken)),
        *("--clock-control", "none", "--profile-from-start", "off"),
        *("--target-processes", "application-only"),
        *("--force-overwrite", "--log-file", str(table)),
    )


def read(text: str) -> list[Counters]:
    """The kernels of a table of ncu, in the order of their launches; [] if there is no table."""
    rows = csv.reader(line for line in text.splitlines() if line.startswith('"'))
    names = next(rows, None)
    units = next(rows, None)
    if names is None or units is None:
        return []
    factors = {name: _factor(unit) for name, unit in zip(names, units, strict=True)}
    return [_counters(dict(zip(names, row, strict=True)), factors) for row in rows]


def per_launch(kernels: Sequence[Counters], launches: int) -> tuple[Counters, ...]:
    """The kernels of one launch, with the medians over all launches.

    Raises:
        ValueError: the launches do not have the same kernels.
    """
    each, rest = divmod(len(kernels), launches)
    positions = [kernels[i::each] for i in range(each)] if each else []
    if rest or not each or any(len({k.name for k in same}) > 1 for same in positions):
        raise ValueError(f"{launches} launches have {len(kernels)} kernels, not the same ones")
    return tuple(map(_middle, positions))


def _factor(unit: str) -> float:
    per_launch_or_block = unit.lower().removesuffix("/block").removesuffix("/thread")
    return _UNITS.get(per_launch_or_block, 1.0)


def _counters(row: Mapping[str, str], factors: Mapping[str, float]) -> Counters:
    def value(names: Sequence[str]) -> float | None:
        for name in names:
            if (number := _number(row.get(name, ""))) is not None:
                return number * factors[name]
        return None

    values = {name: value(choices) for name, choices in (_PLAIN | _SHARES).items()}
    sectors = value((_SECTORS,))
    values["l2_bytes"] = None if sectors is None else sectors * _SECTOR_BYTES
    stalls = {
        match[1]: number
        for name in row
        if (match := _STALL.fullmatch(name)) and (number := value((name,))) is not None
    }
    if values["us"] is None:
        raise ValueError("it has no durations")
    return _made(
        row["Kernel Name"], _extent(row["Grid Size"]), _extent(row["Block Size"]), values, stalls
    )


def _made(
    name: str,
    blocks: int,
    threads: int,
    values: Mapping[str, float | None],
    stalls: Mapping[str, float],
) -> Counters:
    """Counters with counts as whole numbers, and no more digits than ncu prints."""
    rounded = {
        field: number if number is None else round(number, None if field in _COUNTS else 4)
        for field, number in values.items()
    }
    kept = {reason: round(n, 3) for reason, n in stalls.items() if n >= _LEAST_STALL}
    shown = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…"
    identity = {"name": shown, "blocks": blocks, "threads": threads, "stalls": kept}
    return msgspec.convert(identity | rounded, Counters)


def _number(cell: str) -> float | None:
    try:
        return float(cell.replace(",", ""))
    except ValueError:  # `n/a`, or no such column
        return None


def _extent(cell: str) -> int:
    """The product of `(2, 64, 1)`."""
    return prod(int(number) for number in re.findall(r"\d+", cell))


def _middle(same: Sequence[Counters]) -> Counters:
    """The medians of one kernel over its launches."""

    def middle(field: str) -> float | None:
        values = [value for item in same if (value := getattr(item, field)) is not None]
        return median(values) if values else None

    first = same[0]
    reasons = dict.fromkeys(reason for item in same for reason in item.stalls)
    stalls = {r: median(item.stalls.get(r, 0.0) for item in same) for r in reasons}
    values = {field: middle(field) for field in (*_PLAIN, *_SHARES, "l2_bytes")}
    return _made(first.name, first.blocks, first.threads, values, stalls)
