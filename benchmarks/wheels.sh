#!/bin/sh
# Download into $2 the wheels that a GPU host with Python $1, torch and nvcc, but no internet, lacks.
# Usage: benchmarks/wheels.sh 3.12 .wheels [further packages of requirements/test.lock]
set -eu
python=$1
folder=$2
shift 2
names="$* alembic annotated-doc annotated-types cffi cryptography cuda-bindings cuda-core cuda-pathfinder cuda-python
  fastapi httptools mako msgspec nvidia-cutlass opentelemetry-api prometheus-client psutil pycparser pydantic
  pydantic-core pydot pytest pytest-timeout sqlalchemy starlette structlog treelib typer typing-extensions
  typing-inspection uvicorn uvloop zstandard"
platforms=""
for glibc in 2_34 2_31 2_28 2_27 2_24 2_17 2_12 2_5; do
  platforms="$platforms --platform manylinux_${glibc}_x86_64"
done
mkdir -p "$folder"
locked=$(mktemp)
trap 'rm -f "$locked"' EXIT
for name in $names; do  # copies the name's lines, with the hashes below it
  sed -n "/^$name==/,/[^\\\\]\$/p" requirements/test.lock | grep . >> "$locked"
done
# shellcheck disable=SC2086 # the platform options are meant to be split
.venv/bin/pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
  --python-version "$python" --implementation cp $platforms --platform manylinux2014_x86_64 \
  --dest "$folder" --require-hashes -r "$locked"
du -sh "$folder"
