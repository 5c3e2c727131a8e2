#!/usr/bin/env bash
# Set-up and tests; without arguments, exactly as CI runs them: as root, or with DOCKER_HOST naming a daemon.
#   bash launch/test.sh             all (4 GB of packages: transformers and SGLang in environments of their own)
#   bash launch/test.sh --fast      the inner loop: without the tests marked slow, engine or docker
#   bash launch/test.sh -k moe      arguments go to pytest
set -euo pipefail
cd "$(dirname "$0")/.."

# Tracing and compiling keep one core busy, so two workers halve the time; a file's tests share fixtures.
tests() { .venv/bin/python -m pytest -n 2 --dist loadfile "$@"; }
check() { .venv/bin/ruff check . && .venv/bin/ruff format --check .; }

if [ "${1:-}" = --fast ]; then
  bash launch/setup.sh
  check
  tests -m "not slow and not engine and not docker" "${@:2}"
  exit
fi
if [ $# -gt 0 ]; then
  bash launch/setup.sh --reference --sglang
  check
  tests "$@"
  exit
fi
if [ -z "${DOCKER_HOST:-}" ]; then
  trap 'bash launch/dockerd.sh stop' EXIT
  DOCKER_HOST=$(bash launch/dockerd.sh | tail -n 1)
  export DOCKER_HOST
fi
bash launch/base_image.sh "$DOCKER_HOST" & # minutes, and so are the packages
image=$!
bash launch/setup.sh --reference --sglang
check
wait $image
status=0
# Engines keep both cores busy, and deadlines are tested on them: alone.
.venv/bin/python -m pytest -m engine || status=$?
tests -m "not engine" || status=$?
exit $status
