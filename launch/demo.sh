#!/usr/bin/env bash
# Set-up and the main job: evaluation of the SFT checkpoint, critic warm-up, PPO, evaluation, plots.
#   bash launch/demo.sh                     writes runs/demo; run again after an interruption, it goes on
#   bash launch/demo.sh --config.seed=1 --workdir=runs/seed1
set -euo pipefail
cd "$(dirname "$0")/.."
bash launch/setup.sh

exec .venv/bin/python -m t1jax.train --config=configs/tiny.py --workdir=runs/demo "$@"
