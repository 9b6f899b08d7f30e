#!/bin/sh
# The float suites within a time limit; while a suite is tuned, kernels for the next one are compiled.
# On a host with two GPUs each gets half of the cores: bf16 on the first, FP8 and fp16 on the second.
# Usage: benchmarks/suites.sh OUT SECONDS
set -u
out=$1
end=$(($(date +%s) + $2))
cores=$(nproc)
gpus=$(nvidia-smi -L | wc -l)
session="python3 benchmarks/gpu_session.py"
left() { echo $((end - $(date +%s) - $1)); }
base() { # CORES DTYPE: compiles its kernels into the common pack store
  taskset -c "$1" $session base --dtype "$2" --out "$out/base-$2"
}
tune() { # DEVICE DTYPE SECONDS-TO-SPARE
  $session tune --dtype "$2" --device "$1" --time-limit "$(left "$3")" --out "$out/$2"
}
if [ "$gpus" -gt 1 ]; then
  half=$((cores / 2))
  (base "0-$((half - 1))" bf16 && tune cuda:0 bf16 20) > "$out/first.log" 2>&1 &
  (base "$half-$((cores - 1))" fp8_e4m3 && tune cuda:1 fp8_e4m3 150
    base "$half-$((cores - 1))" fp16 && tune cuda:1 fp16 20) > "$out/second.log" 2>&1 &
else
  (
    base "0-$((cores - 1))" bf16
    base "2-$((cores - 1))" fp8_e4m3 > "$out/second.log" 2>&1 &
    tune cuda:0 bf16 170
    wait
    tune cuda:0 fp8_e4m3 20
  ) > "$out/first.log" 2>&1 &
fi
wait
