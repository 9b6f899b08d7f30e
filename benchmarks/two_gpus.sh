#!/bin/sh
# The float suites on a host of two GPUs, each with half of the cores: bf16 and unseen problems on
# the one, FP8 and fp16 on the other. Usage: benchmarks/two_gpus.sh OUT SECONDS
set -u
out=$1
end=$(($(date +%s) + $2))
half=$(($(nproc) / 2))
session="python3 benchmarks/gpu_session.py"
left() { echo $((end - $(date +%s) - $1)); }
(
  first="taskset -c 0-$((half - 1))"
  $first $session base tune --dtype bf16 --device cuda:0 --time-limit "$(left 30)" --out "$out/a"
  $first $session tune --suite configs/suites/unseen_aligned.toml --dtype bf16 --device cuda:0 \
    --time-limit "$(left 60)" --out "$out/unseen"
  PYTHONPATH=.gpu-site:client:. timeout "$(left 10)" $first python3 -m pytest -q --tb=short \
    -p no:cacheprovider tests/gpu/test_cublaslt.py tests/gpu/test_workloads.py
) > "$out/first.log" 2>&1 &
(
  second="taskset -c $half-$((2 * half - 1))"
  $second $session base tune --dtype fp8_e4m3 --device cuda:1 --time-limit "$(left 30)" --out "$out/b"
  $second $session base tune --dtype fp16 --device cuda:1 --time-limit "$(left 130)" --out "$out/c"
) > "$out/second.log" 2>&1 &
wait
