#!/usr/bin/env python3
"""A script for a GPU host that has torch and nvcc, but no internet: set up, test, tune, record.

    python3 benchmarks/gpu_session.py STEP [STEP …] [--out DIR] [--device cuda:N] [--dry-run]

Steps run in the order given. Each writes its results into --out as it goes, so that a
session that is cut off keeps its results. A failing step is reported, and the next one still runs.

    test      tests/gpu or --tests, with the machine-readable report gpu-tests-*.json
    build_tests  the kernels of the same files, without tests: another step may use the GPU
    whole     all of tests/gpu on all GPUs of the host, kernels first, within --time-limit; a second
              call on the same machine goes on: whole-*.json
    ranks     tests/gpu/test_ranks.py only, on all of the host's GPUs: ranks-*.json
    cold      three problems, each with an empty database and no compiled kernels: cold-*.json
    base      the time of `gemmsmith compile --base` on all cores: base-*.json; later steps use
              its packs
    waiting   seconds for the problems of configs/suites/unseen.toml, one by one and in one
              process, and for a suite, with the packs of base: waiting-*.json
    stability three problems tuned ten times each with those packs, their winners raced against
              each other: stability-*.json
    bake      the shipped winners of each element type, with carried kernels: winners-*.gspack
    compile   the kernels of the suite's problems
    tune      the suite with the compiled kernels; winners are exported as winners-*.jsonl
    missing   the problems that only winners of another GPU ship for, as tune
    record    exhaustive sweeps of sweeps.toml or --suite, of what is compiled: sweep-*.jsonl.zst
    peers     other libraries and the winners: peers-<dtype>.json (tune their suite first:
              `tune peers --suite benchmarks/peers/problems.toml`)
    ceilings  the best rates of the GPU's memory and of cuBLAS: ceilings.json
    train     torch and gemmsmith in examples/train_gpt.py, two models in bf16 and fp8, eager,
              compiled and in a graph, after tuning their products: train-*.json, a file and a
              picture of each run, train-*.gspack, and the host's time of calls: host-cost-*.json
    train_moe the same for examples/train_qwen3_moe.py, 2048 and 16384 tokens a step, and for
              train_moe.py, in bf16, eager and then compiled, with the carried or the shipped
              winners: train-moe-*.json
    experts   a layer of experts, transformers' and gemmsmith's: experts-*.json
    train_fused  MLPs with both passes fused: transformers' Llama and Qwen3 (train_llama.py), GPT
              and Llama blocks of train_gpt.py, in bf16, eager and then compiled, with the carried
              or the shipped winners: train-fused-*.json
    programs  benchmarks/programs and examples/train.py, unchanged, through `gemmsmith run`: seconds
              to the first tuned step, cold and warm, then processes without and with winners in
              turns, eager and then compiled: programs-*.json
    fleet     a suite tuned by a fleet of one GPU, then of all of this host's, with nothing compiled
              and again (Ray among the wheels): fleet-*.json, winners-fleet-*.jsonl
    norms     steps of transformers' models with RMS norms of several operators and by torch's
              fused kernel, and norms alone: norms-*.json; no winners are needed
    heads     a head and its loss, with chunks of three sizes, beside torch and its products:
              heads-*.json
    models    steps of twenty models that nothing is tuned for, with the winners of `bake`, spread
              over the visible GPUs: models-*.json
    muon      steps of torch.optim.Muon, with what `bake --dtype bf16.symmetric` baked: muon-*.json
    invariance  configs/suites/invariant.toml tuned for one order of sums, with a short list of
              kernels: winners-*.jsonl; then its bits compared in 10,000 ways, logits in two
              processes, steps of models, and its cost: invariance-*.json; a second call on the
              same machine goes on
    alone     winners of .packs/ or the shipped ones, and cuBLAS, each at its own clock:
              alone-*.json
    advice    ten sizes that are not aligned, and the same padded, with what is compiled: predicted
              and measured gain, 200 s at most: advice-*.json
    report    the session's winners as a page: report/
    profile   Nsight Compute on the shipped winners of ten problems, or of --problem, and on their
              defaults, within four minutes: profiles-*.jsonl, for `benchmarks.profiles add`
    kernels   the kernels that newcomers need, as `make kernels` builds them: *.gskernels
    packs     the pack store in parts, packs.tar.zst.*, to carry into the next session in .packs/

Several sessions may run at once on a host with several GPUs: give each its own --device and
--dtype; the names of its database and logs have both.

The wheels come from .wheels/ (`make wheels` on a machine with internet, and benchmarks/site.py for
one small archive of them), carried packs, files of kernels, and winners of train, train_moe and
train_fused from .packs/, and transformers from the host. This script uses the standard library
only, because nothing else is installed yet.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    # Python put this folder first; packages are imported from the root.
    sys.path[0] = str(ROOT)

from benchmarks.session.core import Session, prepare  # noqa: E402
from benchmarks.session.profiling import problem_name  # noqa: E402
from benchmarks.session.programs import PROGRAMS  # noqa: E402
from benchmarks.session.steps import STEPS  # noqa: E402
from benchmarks.session.training import MODES, RUNS  # noqa: E402

DTYPES = ("bf16", "fp16", "fp8_e4m3")
MODELS = (*RUNS, *PROGRAMS)
JOBS_VARIABLE = "GEMMSMITH_COMPILE_JOBS"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments, run the steps, and print their exit statuses."""
    steps, session = parse(arguments)
    outcomes = {"prepare": prepare(session)}
    for step in steps if outcomes["prepare"] == 0 else []:
        began = time.monotonic()
        try:
            outcomes[step] = STEPS[step](session)
        except Exception:  # noqa: BLE001 - the next step still runs
            traceback.print_exc()
            outcomes[step] = 1
        print(f"== {step}: exit {outcomes[step]}, {time.monotonic() - began:.0f} s", flush=True)
    print(json.dumps(outcomes), flush=True)
    return max(outcomes.values())


def parse(arguments: Sequence[str] | None) -> tuple[list[str], Session]:
    """Parse the steps to run, and their session."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="+", choices=STEPS, metavar="STEP")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / ".gpu-out")))
    parser.add_argument("--dry-run", action="store_true", help="print the commands only")
    parser.add_argument("--dtype", action="append", help=f"{', '.join(DTYPES)} (default: all)")
    parser.add_argument(
        "--time-limit",
        type=int,
        default=3600,
        help="seconds for each of tune, peers, train…, cold, base, waiting, stability",
    )
    parser.add_argument("--effort", default="default")
    parser.add_argument("--limit", type=int, help="most kernels of each problem, or of the base")
    parser.add_argument("--device", default="cuda:0", help="cuda:N")
    parser.add_argument("--suite", help="problems to compile, tune, record, compare")
    parser.add_argument(
        "--problem",
        type=problem_name,
        action="append",
        help="to profile: sizes, type and layout, such as '4096x6144x1024 bf16 tn'",
    )
    parser.add_argument(
        "--model",
        choices=MODELS,
        action="append",
        help="for train…, programs, norms (default: all)",
    )
    parser.add_argument(
        "--mode", choices=MODES, action="append", help="for train…, programs (default: all)"
    )
    parser.add_argument("--tests", nargs="+", default=["tests/gpu"], help="files of `test`")
    parser.add_argument(
        "--bundle", type=Path, help="winners for `programs`, which then does not tune"
    )
    parser.add_argument(
        "--rounds", type=int, default=2, help="processes of `programs` with winners"
    )
    parser.add_argument("--jobs", type=int, help=f"compilers at once ({JOBS_VARIABLE})")
    options = parser.parse_args(arguments)
    if not re.fullmatch(r"cuda:\d+", options.device):
        parser.error(f"--device must be cuda:N, not {options.device}")
    if options.jobs is not None:
        os.environ[JOBS_VARIABLE] = str(options.jobs)
    tag = "-".join([options.device.replace(":", ""), *(options.dtype or [])])
    return options.steps, Session(
        out=options.out.resolve(),
        dry_run=options.dry_run,
        dtypes=tuple(options.dtype or DTYPES),
        time_limit=options.time_limit,
        effort=options.effort,
        limit=options.limit,
        device=options.device,
        suite=options.suite,
        problems=tuple(options.problem or ()),
        models=tuple(options.model or MODELS),
        modes=tuple(options.mode or MODES),
        tests=tuple(options.tests),
        bundle=options.bundle,
        rounds=options.rounds,
        tag=tag,
    )


def _end(number: int, _: object) -> None:
    """Exit on a signal, so that the session still exports its winners."""
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    sys.exit(main())
