#!/usr/bin/env bash
# Set-up and tests; without arguments, exactly as CI runs them.
#   bash launch/test.sh             all but the engine tests
#   bash launch/test.sh --fast      the inner loop: without the tests marked slow
#   bash launch/test.sh -k moe      further arguments go to pytest
#   bash launch/test.sh --engines   those on real SGLang engines alone (2.6 GB of packages)
set -euo pipefail
cd "$(dirname "$0")/.."

chosen="not engine" environments=(--reference)
arguments=()
for argument in "$@"; do
  case "$argument" in
    --fast) chosen="not slow and not engine" ;;
    --engines) chosen=engine environments=(--sglang) ;;
    *) arguments+=("$argument") ;;
  esac
done
bash launch/setup.sh "${environments[@]}"

.venv/bin/ruff check .
.venv/bin/ruff format --check .
# Tracing and compiling keep one core busy, so two workers halve the time; a file's tests share fixtures.
exec .venv/bin/python -m pytest -n 2 --dist loadfile -m "$chosen" "${arguments[@]}"
