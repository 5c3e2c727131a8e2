"""Evaluates a policy on held-out tasks: resolved share and mean reward, overall and per family.

python -m t1jax.evaluate --config=configs/tiny.py --tasks=DIR --checkpoint=DIR --out=DIR
"""

import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from t1jax import command
from t1jax.agent.chat import Chat
from t1jax.agent.stitch import count
from t1jax.agent.task import load_tasks
from t1jax.checkpoint import load_params
from t1jax.experiment import Experiment, read_experiment
from t1jax.files import write_json
from t1jax.progress import progress_bar
from t1jax.rollout import store
from t1jax.rollout.collect import Trial, collect
from t1jax.room import check_room
from t1jax.run import abstract_policy, collect_config, make_chat, make_sampler
from t1jax.sandbox.pool import MakeSandbox, open_sandboxes
from t1jax.types import Engine, Task, Trajectory

# Evaluation trials are numbered from here on: they never draw the randomness of a training one.
FIRST_TRIAL = 1 << 30


def evaluate(
    experiment: Experiment,
    tasks: Sequence[Task],
    make_sandbox: MakeSandbox,
    sampler: Engine,
    chat: Chat,
) -> list[Trajectory]:
    """`attempts` trials of every task, in order; the same randomness for every policy."""
    repeated = [task for task in tasks for _ in range(experiment.evaluate.attempts)]
    trials = [Trial(task, FIRST_TRIAL + i) for i, task in enumerate(repeated)]
    config = collect_config(experiment, sampler.sampling)
    with progress_bar() as bar:
        task = bar.add_task("evaluating", total=len(trials), note="")
        return asyncio.run(
            collect(
                trials,
                make_sandbox,
                sampler,
                chat,
                config,
                progress=lambda _: bar.advance(task),
            )
        )


def summarize(trajectories: Sequence[Trajectory]) -> dict:
    """resolved (share), reward (mean), turns (mean), trials, and the first two per family; drift (sampled
    ids that are not the sampler's own).

    Trials that were given up (reward None) count nowhere but in `given_up`. The first chunk of a trial
    stands for it.
    """
    drift = count(trajectories).drifted
    turns = sum(len(t.turns) for t in trajectories if t.reward is not None)
    given_up = sum(t.reward is None for t in trajectories)
    trajectories = [t for t in trajectories if t.reward is not None and t.chunk == 0]
    families = defaultdict(list)
    for trajectory in trajectories:
        families[trajectory.family].append(trajectory)
    return {
        **_scores(trajectories),
        "turns": turns / len(trajectories),
        "trials": len(trajectories),
        "given_up": given_up,
        "drift": drift,
        "families": {name: _scores(families[name]) for name in sorted(families)},
    }


def table(before: dict, after: dict | None = None) -> str:
    """Resolved share and reward per family as lines of text; with `after`, both side by side."""
    rows = [("all", before, after)]
    rows += [(name, b, after and after["families"][name]) for name, b in before["families"].items()]
    lines = []
    for name, b, a in rows:
        line = f"{name:10} resolved {b['resolved']:6.1%}  reward {b['reward']:.3f}"
        if a:
            line += f"   ->  resolved {a['resolved']:6.1%}  reward {a['reward']:.3f}"
        lines.append(line)
    return "\n".join(lines)


def _scores(trajectories: Sequence[Trajectory]) -> dict:
    n = len(trajectories)
    return {
        "resolved": sum(t.resolved for t in trajectories) / n,
        "reward": sum(t.reward for t in trajectories) / n,
    }


def main() -> None:
    experiment = read_experiment(CONFIG.value)
    tasks = load_tasks(Path(TASKS.value))
    chat = make_chat(experiment)
    check_room(experiment.episode, chat, tasks)
    params = load_params(Path(CHECKPOINT.value), abstract_policy(experiment))
    out = command.workdir_path(OUT.value)
    sampler = make_sampler(experiment, chat, experiment.evaluate.sampling, out / "engines")
    try:
        sampler.load(params, 0)
        sampler.warm_up()
        with open_sandboxes(experiment.sandbox) as make_sandbox:
            trajectories = evaluate(experiment, tasks, make_sandbox, sampler, chat)
    finally:
        sampler.close()
    result = summarize(trajectories)
    store.write(out / "trajectories" / "evaluation.parquet", trajectories)
    write_json(out / "evaluation.json", result)
    print(table(result), file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    CONFIG = config_flags.DEFINE_config_file("config", None, "Experiment file.", lock_config=True)
    TASKS = flags.DEFINE_string("tasks", None, "Folder of Harbor tasks.", required=True)
    CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Folder of policy weights.", required=True)
    OUT = flags.DEFINE_string("out", None, "Where the results go.", required=True)
    flags.mark_flag_as_required("config")
    command.run(main)
