"""The recorded profiles of configs/profiles: made on a GPU, or added from files.

    python -m benchmarks.profiles build                       # their kernels, without a GPU
    python -m benchmarks.profiles record -o profiles.jsonl    # ten shipped problems, on a GPU
    python -m benchmarks.profiles add profiles.jsonl          # into configs/profiles
    python -m benchmarks.profiles add DATE-GPU-ncu-MxNxK-DTYPE.csv --winners winners.jsonl

`add` also takes tables of Nsight Compute in which launches of the default come first, then as many
of the winner's kernel. Such a table does not name the launch's parameters: they are those of the
winner in the file, whose kernel must be the table's.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from math import inf
from pathlib import Path

from benchmarks.peers.winners import add_packs, find_packs, find_winners
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import Environment
from gemmsmith.core.operation import of_dtype
from gemmsmith.core.problem import Problem
from gemmsmith.errors import InvalidProblem
from tuner.errors import TunerError
from tuner.exchange import read_winners
from tuner.explain.resources import resources
from tuner.measure.local_gpu import local_gpu
from tuner.profiling.files import add_profiles, file_in, read_profiles, shipped_folder
from tuner.profiling.ncu import per_launch, read
from tuner.profiling.recorder import LAUNCHES, Ncu, record
from tuner.profiling.records import ProblemProfile, Profiled
from tuner.trial import Winner

ROOT = Path(__file__).resolve().parent.parent
PROBLEMS = (
    "16x4096x14336 bf16",  # few rows
    "4096x6144x1024 bf16",
    "128x128x16384 bf16",  # split along K
    "256x10240x8192 fp8_e4m3.scale_row",
    "256x4096x4096 int8",
    "32x32x7168x2048 bf16.group_rows",
    "4096x6144x1024 bf16.then_silu_gate",
    "16384x768x768 bf16.then_bias_residual",
    "4096x3072x1024 bf16.then_dsilu_gate_act tt",  # backward
    "6144x4096x1024 bf16 nt",  # a weight's gradient
)
"""Shipped winners of every kind that are faster than the default."""

_NAME = re.compile(
    r"(?P<date>[\d-]{10})-(?P<gpu>\w+)-ncu-(?P<sizes>\d+(?:x\d+){2,3})-(?P<dtype>[\w.]+)"
)
_KERNEL = re.compile(r"cutlass3x_\w+")
_OWN = re.compile(rf"gemmsmith::|{_KERNEL.pattern}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Record or add profiles; 0 if all problems have one."""
    options = _parse(arguments)
    winners = options.winners or sorted((ROOT / "configs" / "winners").glob("*.jsonl"))
    if options.command == "add":
        return _add(options.files, winners, options.output)
    if options.command == "build":
        return _build(options, winners)
    return _record(options, winners)


def _add(files: Sequence[Path], winners: Sequence[Path], folder: Path) -> int:
    by_device: defaultdict[str, list[ProblemProfile]] = defaultdict(list)
    for path in files:
        if path.suffix == ".csv":
            profiles = [converted(path, [w for file in winners for w in read_winners(file)])]
        else:
            profiles = read_profiles(path)
        for profile in profiles:
            by_device[profile.device.slug].append(profile)
    for slug, profiles in by_device.items():
        add_profiles(file_in(folder, slug), profiles)
        print(f"{file_in(folder, slug)}: {len(profiles)} profiles added", flush=True)
    return 0


def converted(path: Path, winners: Sequence[Winner]) -> ProblemProfile:
    """The profile of a table of ncu, which is named by its date, its GPU and its problem.

    Raises:
        ValueError: not such a table, or no winner has its kernel.
    """
    named = _NAME.fullmatch(path.stem)
    if named is None:
        raise ValueError(f"{path.name} is not named DATE-GPU-ncu-MxNxK-DTYPE.csv")
    m, n, k, *groups = (int(size) for size in named["sizes"].split("x"))
    problem = Problem.of(of_dtype(named["dtype"]), m, n, k, *groups)
    kernels = read(path.read_text())
    own = next((i for i, kernel in enumerate(kernels) if _OWN.search(kernel.name)), 0)
    default, ours = (per_launch(part, LAUNCHES) for part in (kernels[:own], kernels[own:]))
    of_problem = (w for w in winners if w.problem == problem and named["gpu"] in w.device.slug)
    winner = next(of_problem, None)
    candidate = winner.candidate if winner else None
    side = Profiled(candidate=candidate, kernels=ours)
    name = _KERNEL.search(side.main.name)
    if winner is None or candidate is None or name is None:
        raise ValueError(f"{path.name}: no winner of {problem}")
    if not candidate.kernel.name.startswith(name[0]):
        raise ValueError(f"{path.name} has {name[0]}, the winner is {candidate.kernel.name}")
    return ProblemProfile(
        problem=problem,
        device=winner.device,
        environment=_unknown(),
        tool="ncu",
        recorded_at=f"{named['date']}T00:00:00+00:00",
        candidate=side,
        default=Profiled(candidate=None, kernels=default),
    )


def _unknown() -> Environment:
    """The software of a table, which does not name it."""
    names = ("gpu_uuid", "driver", "cuda", "cutlass", "compiler", "torch", "cublas", "gemmsmith")
    return Environment(**dict.fromkeys(names, ""))


def _build(options: argparse.Namespace, files: Sequence[Path]) -> int:
    """Compile the kernels of the problems' winners on all device models."""
    problems = {*_problems(options)}
    known = (winner for file in files for winner in read_winners(file))
    chosen = [w.candidate.kernel for w in known if w.problem in problems and w.candidate]
    kernels = {kernel.name: kernel for kernel in chosen}
    packs, reasons = find_packs(list(kernels.values()), options.packs, inf)
    for name, kernel in kernels.items():
        print(f"{name}: {packs.get(kernel.name) or reasons[name]}")
    return 0 if len(packs) == len(kernels) else 1


def _problems(options: argparse.Namespace) -> list[Problem]:
    return options.problem or [Problem.parse(text) for text in PROBLEMS]


def _record(options: argparse.Namespace, files: Sequence[Path]) -> int:
    """Profile one problem after the other; each is written before the next begins."""
    deadline = time.monotonic() + options.time_limit
    model = local_gpu()
    with_ncu = Ncu.here() if model else None
    if model is None or with_ncu is None:
        missing = "ncu is not on the path" if model else "no CUDA GPU on this machine"
        print(f"{missing}: nothing profiled")
        return 2
    winners = find_winners(files, None, model)

    def contestant(problem: Problem) -> tuple[Candidate, Path]:
        winner = winners.get(problem)
        if time.monotonic() + longest_s > deadline:
            raise TunerError("no time left")
        if winner is None or winner.candidate is None:
            raise TunerError(f"no winner on {model.name}: tune it first")
        kernel = winner.candidate.kernel
        packs, reasons = find_packs([kernel], options.packs, deadline)
        if kernel.name not in packs:
            raise TunerError(reasons[kernel.name])
        return winner.candidate, packs[kernel.name]

    left, longest_s = 0, 0.0
    for problem in _problems(options):
        began = time.monotonic()
        try:
            candidate, pack = contestant(problem)
            profile = record(problem, model, [(candidate, pack)], with_ncu)
            add_profiles(options.output, [profile])
        except TunerError as error:
            print(f"{problem}: {error}", flush=True)
            left += 1
            continue
        took_s = time.monotonic() - began
        longest_s = max(took_s, longest_s)
        ours, theirs = profile.candidate.main, profile.default.main
        taken = resources(candidate.kernel, pack)
        print(
            f"{problem}: {ours.us:.2f} against {theirs.us:.2f} µs; {ours.registers} registers, "
            f"{(taken and taken.registers) or 'not known'} by the pack; {took_s:.0f} s",
            flush=True,
        )
    return 1 if left else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profiles",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="profile winners on this machine's GPU")
    building = commands.add_parser("build", help="compile the kernels for `record`")
    for command in (recording, building):
        command.add_argument("--problem", type=_problem, action="append", help="default: ten kinds")
        add_packs(command)
    recording.add_argument("--time-limit", type=float, default=240.0, help="seconds")
    recording.add_argument("-o", "--output", type=Path, required=True, help="file of profiles")
    adding = commands.add_parser("add", help="put profiles into configs/profiles")
    adding.add_argument("files", type=Path, nargs="+", help="files of profiles, or tables of ncu")
    adding.add_argument("-o", "--output", type=Path, default=shipped_folder(), help="folder")
    for command in (recording, building, adding):
        command.add_argument("--winners", type=Path, action="append", help="winners files")
    return parser.parse_args(arguments)


def _problem(text: str) -> Problem:
    try:
        return Problem.parse(text)
    except InvalidProblem as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
