#!/usr/bin/env bash
# Makes .venv with the exact packages of requirements.txt. Idempotent: does nothing when they are there.
#   bash launch/setup.sh            PYTHON=/path/to/python3.12 bash launch/setup.sh
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

wanted=$(cat requirements.txt <("$python" --version) | sha256sum | cut -d' ' -f1)
[ "$(cat .venv/complete 2>/dev/null || true)" = "$wanted" ] && exit 0

"$python" -m venv .venv || fail "cannot make .venv: the venv module is missing (Debian: apt-get install python3-venv)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt ||
  fail "pip could not install requirements.txt: check the network or the package index, then run this again"
echo "$wanted" >.venv/complete
