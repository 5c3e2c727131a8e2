"""Speed, each benchmark beside another way to do the same, in one run on one machine.

    python -m t1jax.bench model      forward, and forward and backward, at three lengths, beside transformers
    python -m t1jax.bench sampler    replies of 1 to 32 streams, beside transformers and SGLang
    python -m t1jax.bench routes     the experts of a trial of 32,768 tokens on their way from an engine
    python -m t1jax.bench rollout    what a turn and a trial cost beside the policy, and a bare container

`model` and `sampler` need .venv-reference (bash launch/setup.sh --reference) and run the same model, weights and
threads on all sides, which take turns; a cell is the best of three rounds. A ratio above 1 means that this project
is faster. The last line printed is a JSON object.
"""

import json
import sys

from t1jax import command
from t1jax.bench import model, rollout, routes, sampler

BENCHES = {
    "model": model.bench,
    "sampler": sampler.bench,
    "routes": routes.bench,
    "rollout": rollout.bench,
}


def main() -> None:
    print(json.dumps({"name": name, **BENCHES[name]()}))


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHES:
        command.fail(f"say which: python -m t1jax.bench {'|'.join(BENCHES)}")
    name = sys.argv.pop(1)
    command.run(main)
