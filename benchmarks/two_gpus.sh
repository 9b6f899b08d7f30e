#!/bin/sh
# Measurements that need a host with two GPUs: a program under FSDP2 with shipped winners, two ranks,
# and fleets of one GPU and of two. While the fleet has one GPU and half of the cores, the other half
# measures a program with the same winners, norms, and the database with 64 writers (if pgserver and
# psycopg are among the wheels). The fleet takes nine minutes, so use two sessions of ten minutes.
# Usage: benchmarks/two_gpus.sh OUT SUITE DTYPE SECONDS
set -u
out=$1
end=$(($(date +%s) + $4))
last=$(($(nproc) - 1))
half=$(($(nproc) / 2))
quarter=$((half + half / 2))
session="python3 benchmarks/gpu_session.py"
left() { echo $((end - $(date +%s) - $1)); }
mkdir -p "$out"
taskset -c "$half-$last" $session build_tests --tests tests/gpu/test_ranks.py --out "$out/build" \
  > "$out/build-said.log" 2>&1 &
build=$!
bundle=$out/fsdp2/winners-cuda0-bf16.gspack
timeout "$(left 5)" $session bake programs --bundle "$bundle" --model llama-fsdp2 --mode eager \
  --dtype bf16 --out "$out/fsdp2" > "$out/fsdp2-said.log" 2>&1
wait $build
timeout "$(left 5)" $session ranks --out "$out/ranks" > "$out/ranks-said.log" 2>&1
[ "$(left 60)" -gt 0 ] || exit 0
$session fleet --suite "$2" --dtype "$3" --effort quick --out "$out" > "$out/fleet-said.log" 2>&1 &
{
  taskset -c "$half-$((quarter - 1))" timeout 120 $session programs --bundle "$bundle" --model llama \
    --mode eager --device cuda:1 --dtype bf16 --out "$out"
  taskset -c "$half-$((quarter - 1))" timeout 110 $session norms --device cuda:1 --out "$out"
} > "$out/one-said.log" 2>&1 &
if [ -d .gpu-site/pgserver ]; then
  id postgres > /dev/null 2>&1 || useradd -r postgres
  mkdir -p /opt/gemmsmith-pg
  cp -r .gpu-site/pgserver .gpu-site/pgserver.libs /opt/gemmsmith-pg
  chmod -R a+rX /opt/gemmsmith-pg
  PATH=/opt/gemmsmith-pg/pgserver/pginstall/bin:$PATH PYTHONPATH=.gpu-site:client:. \
    taskset -c "$quarter-$last" timeout 150 python3 -m benchmarks.writers --batch 16 --seconds 6 \
    --rounds 3 > "$out/writers.json" 2> "$out/writers-said.log" &
fi
wait
tail -n 4 "$out/fleet-said.log" | cut -c 1-300
