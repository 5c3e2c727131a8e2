#!/usr/bin/env bash
# Set-up and all tests, exactly as CI runs them.
#   bash launch/test.sh             everything
#   bash launch/test.sh --fast      the inner loop: without the tests marked slow
#   bash launch/test.sh -k moe      further arguments go to pytest
set -euo pipefail
cd "$(dirname "$0")/.."
bash launch/setup.sh --reference

arguments=()
for argument in "$@"; do
  if [ "$argument" = --fast ]; then arguments+=(-m "not slow"); else arguments+=("$argument"); fi
done

.venv/bin/ruff check .
.venv/bin/ruff format --check .
# Tracing and compiling keep one core busy, so two workers halve the time; a file's tests share fixtures.
exec .venv/bin/python -m pytest -n 2 --dist loadfile "${arguments[@]}"
