#!/bin/sh
# Grouped products within a time limit: their kernels are compiled family by family, and tuned as
# soon as the first are there. On a second GPU their tests run meanwhile, and then all others.
# Usage: benchmarks/moe.sh OUT SECONDS
set -u
out=$1
end=$(($(date +%s) + $2))
last=$(($(nproc) - 1))
half=$((last / 2))
session="python3 benchmarks/gpu_session.py"
left() { echo $((end - $(date +%s) - $1)); }
compile() { # CORES NAME GROUPING LAYOUT M N K
  printf '[[problem]]\nname = "all"\ngrouping = "%s"\ngroups = 32\nlayout = "%s"\nm = %s\nn = %s\nk = %s\n' \
    "$3" "$4" "$5" "$6" "$7" > "$out/$2.toml"
  taskset -c "$1" $session compile --suite "$out/$2.toml" --dtype "$8" --out "$out/compile-$2"
}
mkdir -p "$out"
{
  compile "0-$half" forward rows tn 4096 4096 7168 bf16
  timeout "$(left 15)" $session tune --suite configs/suites/moe.toml --dtype bf16 \
    --time-limit "$(left 45)" --out "$out/moe" > "$out/tune.log" 2>&1 &
  compile "2-$half" input rows tt 4096 7168 4096 bf16
  compile "2-$half" weight depth nt 4096 7168 4096 bf16
  wait
} > "$out/compile.log" 2>&1 &
if [ "$(nvidia-smi -L | wc -l)" -gt 1 ]; then
  taskset -c "$((half + 1))-$last" timeout "$(left 10)" $session test --device cuda:1 \
    --out "$out/tests" > "$out/tests.log" 2>&1 &
fi
wait
