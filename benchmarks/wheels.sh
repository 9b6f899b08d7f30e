#!/bin/sh
# Download into $2 the wheels that a GPU host with Python $1, torch and nvcc, but no internet, lacks.
# Usage: benchmarks/wheels.sh 3.12 .wheels
set -eu
python=$1
folder=$2
names="alembic annotated-types cffi cryptography cuda-bindings cuda-core cuda-pathfinder cuda-python fastapi httptools mako msgspec
  narwhals  nvidia-cutlass opentelemetry-api prometheus_client psutil pydantic pycparser pydantic_core pydot pytest
  pytest-timeout SQLAlchemy starlette structlog treelib typer annotated-doc typing-inspection
  typing_extensions uvicorn uvloop zstandard"
platforms=""
for glibc in 2_34 2_31 2_28 2_27 2_24 2_17 2_12 2_5; do
  platforms="$platforms --platform manylinux_${glibc}_x86_64"
done
mkdir -p "$folder"
for name in $names; do
  version=$(grep -i "^$name==" requirements.lock || grep -i "^$(echo "$name" | tr - _)==" requirements.lock)
  # shellcheck disable=SC2086 # the platform options are meant to be split
  .venv/bin/pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --python-version "$python" --implementation cp $platforms --platform manylinux2014_x86_64 \
    --dest "$folder" "$version"
done
du -sh "$folder"
