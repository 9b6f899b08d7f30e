#!/bin/sh
# INT8, FP32 accumulation and TF32 on one GPU within a time limit; while a suite is tuned, kernels for
# the next one are compiled. Usage: benchmarks/operations.sh OUT SECONDS
set -u
out=$1
end=$(($(date +%s) + $2))
cores=$(nproc)
session="python3 benchmarks/gpu_session.py"
f32=bf16.out_f32.accumulate
left() { echo $((end - $(date +%s) - $1)); }
base() { # CORES DTYPE KERNELS
  taskset -c "$1" $session base --dtype "$2" --limit "$3" --out "$out/base-$2"
}
tune() { # SUITE DTYPE EFFORT SECONDS-TO-SPARE
  $session tune --suite "configs/suites/$1.toml" --dtype "$2" --effort "$3" \
    --time-limit "$(left "$4")" --out "$out/$2"
}
mkdir -p "$out"
base "0-$((cores - 1))" int8 44 > "$out/first.log" 2>&1
(base "2-$((cores - 1))" $f32 36; base "2-$((cores - 1))" tf32 12) > "$out/second.log" 2>&1 &
{
  tune int8 int8 quick 140
  wait
  tune weight_gradients_f32 $f32 default 35
  tune tf32 tf32 quick 5
} >> "$out/first.log" 2>&1
