#!/bin/sh
# Write run.lock, gpu.lock and test.lock: each package's exact version, and the hash of each file of it
# that may be installed, for all systems and Pythons. Needs uv. What is locked stays as it is, unless
# --upgrade is given.
#   run    the service, with Parquet and PostgreSQL
#   gpu    run, the fleet, torch with CUDA's libraries, and the compiler: gigabytes
#   test   run, and what tests, the linter, reports and docs need; its torch is cpu.lock's, or gpu.lock's
set -eu
cd "$(dirname "$0")/.."
wanted=$(mktemp -d)
trap 'rm -rf "$wanted"' EXIT
# setuptools builds the project, which is never downloaded.
echo 'setuptools>=77' > "$wanted/in"
echo gemmsmith > "$wanted/ours"
# What torch of PyPI needs on Linux, and torch's CPU build does not.
printf '%s\n' cuda-toolkit nvidia-cudnn-cu13 nvidia-cusparselt-cu13 nvidia-nccl-cu13 \
  nvidia-nvshmem-cu13 triton > "$wanted/cuda"
# The release of torch that is tested: that of cpu.lock, which is kept by hand.
sed -n 's/^\(torch==[0-9.]*\).*/\1/p' requirements/cpu.lock > "$wanted/torch"
# The oldest Python that the project takes: each package has one version, which installs on it.
oldest=$(sed -n 's/^requires-python = ">=\(.*\)"/\1/p' pyproject.toml)
lock() {
  name=$1
  shift
  uv pip compile --quiet --universal --python-version "$oldest" --fork-strategy fewest \
    --generate-hashes --no-annotate --custom-compile-command 'make lock' \
    --only-binary :all: --emit-build-options \
    --excludes "$wanted/ours" -c "$wanted/torch" --output-file "requirements/$name.lock" "$@" \
    pyproject.toml client/pyproject.toml "$wanted/in"
}
lock run --extra parquet --extra postgresql "$@"
lock gpu --extra fleet --extra gpu --extra parquet --extra postgresql -c requirements/run.lock "$@"
lock test --extra test --extra report -c requirements/gpu.lock --excludes "$wanted/cuda" \
  --no-emit-package torch "$@"
