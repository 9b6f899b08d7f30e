#!/bin/sh
# Grouped products within a time limit: kernels are compiled family by family, and problems are tuned
# as soon as the first kernels are compiled. On a second GPU their tests run meanwhile, then exhaustive
# sweeps are recorded, and then all other tests run.
# Usage: benchmarks/moe.sh OUT SECONDS
set -u
out=$1
end=$(($(date +%s) + $2))
last=$(($(nproc) - 1))
half=$((last / 2))
session="python3 benchmarks/gpu_session.py"
left() { echo $((end - $(date +%s) - $1)); }
compile() { # CORES NAME GROUPING LAYOUT M N K DTYPE
  printf '[[problem]]\nname = "all"\ngrouping = "%s"\ngroups = 32\nlayout = "%s"\nm = %s\nn = %s\nk = %s\n' \
    "$3" "$4" "$5" "$6" "$7" > "$out/$2.toml"
  taskset -c "$1" $session compile --suite "$out/$2.toml" --dtype "$8" --out "$out/compile-$2"
}
tune() { # DTYPE SECONDS-TO-SPARE
  timeout "$(left 5)" $session tune --suite configs/suites/moe.toml --dtype "$1" \
    --time-limit "$(left "$2")" --out "$out/moe-$1"
}
mkdir -p "$out"
{
  compile "0-$half" forward rows tn 4096 4096 7168 bf16
  {
    compile "2-$half" input rows tt 4096 7168 4096 bf16
    compile "2-$half" weight depth nt 4096 7168 4096 bf16
    compile "2-$half" fp8 rows tn 4096 4096 7168 fp8_e4m3.scale_row
  } > "$out/compile.log" 2>&1 &
  tune bf16 40
  tune fp8_e4m3.scale_row 20
} > "$out/first.log" 2>&1 &
if [ "$(nvidia-smi -L | wc -l)" -gt 1 ]; then
  {
    grouped=$(ls tests/gpu/test_*.py | grep group)
    other=$(ls tests/gpu/test_*.py | grep -v group)
    # shellcheck disable=SC2086 # a list of files
    taskset -c "$((half + 1))-$last" $session test --device cuda:1 --out "$out/grouped" --tests $grouped
    taskset -c "$((half + 1))-$last" timeout "$(left 20)" $session record --device cuda:1 \
      --suite configs/suites/sweeps_moe.toml --dtype bf16 --out "$out/record"
    # shellcheck disable=SC2086
    taskset -c "$((half + 1))-$last" timeout "$(left 5)" $session test --device cuda:1 \
      --out "$out/tests" --tests $other
  } > "$out/second.log" 2>&1 &
fi
wait
