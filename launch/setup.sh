#!/usr/bin/env bash
# Makes .venv with the exact packages of requirements.txt. Idempotent: does nothing when they are there.
#   bash launch/setup.sh              PYTHON=/path/to/python3.12 bash launch/setup.sh
#   bash launch/setup.sh --reference  also .venv-reference: torch and transformers, which tests compare with
#   bash launch/setup.sh --sglang     also .venv-sglang: the SGLang engine on a CPU, 2.6 GB
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "setup: $*" >&2; exit 1; }

python=${PYTHON:-}
if [ -z "$python" ]; then
  for candidate in python3.13 python3.12 python3.11 python3; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      python=$candidate
      break
    fi
  done
fi
[ -n "$python" ] || fail "Python 3.11 or newer is missing: install it (Debian: apt-get install python3 python3-venv) or name one with PYTHON=..."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$python is older than Python 3.11"

# make FOLDER REQUIREMENTS [REQUIREMENTS WITHOUT DEPENDENCIES]
make() {
  local wanted
  wanted=$(cat "${@:2}" <("$python" --version) | sha256sum | cut -d' ' -f1)
  [ "$(cat "$1/complete" 2>/dev/null || true)" = "$wanted" ] && return
  "$python" -m venv "$1" || fail "cannot make $1: the venv module is missing (Debian: apt-get install python3-venv)"
  "$1/bin/python" -m pip install --quiet --disable-pip-version-check -r "$2" ||
    fail "pip could not install $2: check the network or the package index, then run this again"
  if [ $# -gt 2 ]; then
    "$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$3" ||
      fail "pip could not install $3: check the network or the package index, then run this again"
  fi
  echo "$wanted" >"$1/complete"
}

make .venv requirements.txt
for argument in "$@"; do
  case "$argument" in
    --reference) make .venv-reference launch/requirements-reference.txt ;;
    --sglang) make .venv-sglang launch/requirements-sglang.txt launch/requirements-sglang-nodeps.txt ;;
    *) fail "unknown argument $argument" ;;
  esac
done
