"""Writes generated task folders.

python -m t1jax.tasks --out=tasks/eval --split=eval --count=128 --seed=0
"""

from pathlib import Path

from absl import flags

from t1jax import command
from t1jax.agent.generate import generate
from t1jax.agent.task import TaskError

OUT = flags.DEFINE_string("out", None, "The folder to make.", required=True)
SPLIT = flags.DEFINE_enum("split", "train", ["train", "eval"], "Which instances.")
COUNT = flags.DEFINE_integer("count", 128, "How many tasks.", lower_bound=1)
SEED = flags.DEFINE_integer("seed", 0, "Which of the possible tasks.")


def main() -> None:
    out = Path(OUT.value)
    if out.exists():
        raise TaskError(f"{out} exists already: remove it or choose another --out")
    generate(out, SPLIT.value, COUNT.value, SEED.value)
    print(f"wrote {COUNT.value} tasks to {out}")


if __name__ == "__main__":
    command.run(main)
