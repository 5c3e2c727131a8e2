"""Supervised warm start: imitates scripted trials, most of them flawed, run in real sandboxes; or recorded ones.

    python -m t1jax.sft --config=configs/tiny.py --workdir=runs/sft
    python -m t1jax.sft --config=configs/tiny.py --workdir=runs/sft --config.sft.trajectories=DIR

First short copying exercises (a small model learns to copy names from its prompt only slowly otherwise),
then the trials: scripts for generated tasks, or DIR/*.json, ATIF documents such as t1jax.export writes, from this
harness or another. The weights end up in WORKDIR/policy, the record of how they came to be beside them.
"""

import asyncio
import dataclasses
import itertools
import json
import random
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import grain
import jax
import numpy as np
import optax

from t1jax import command
from t1jax.agent.action import SYSTEM
from t1jax.agent.chat import Chat
from t1jax.agent.families import NAMES, Script
from t1jax.agent.generate import generate, instances
from t1jax.agent.script import ScriptSampler
from t1jax.agent.task import load_tasks
from t1jax.checkpoint import Checkpoints, save_params
from t1jax.experiment import ConfigError, Experiment, read_experiment, write_config
from t1jax.files import write_json
from t1jax.mesh import make_mesh, replicate
from t1jax.metrics import MetricsWriter
from t1jax.model.lm import init_policy
from t1jax.ppo.imitate import Examples, make_imitate_step
from t1jax.ppo.optim import decays
from t1jax.progress import progress_bar
from t1jax.recorded import Stream, read_recorded
from t1jax.rollout.collect import CollectConfig, Trial, collect
from t1jax.run import make_chat
from t1jax.sandbox.pool import open_sandboxes
from t1jax.types import digest

WARMUP = 100  # steps of a rising learning rate
FLOOR = 0.05  # of the learning rate, reached at the last step
MAX_COPIES = 6


def choose_scripts(experiment: Experiment) -> list[Script]:
    """The script to imitate for each SFT task: the oracle's with `oracle_share`, else a flawed one."""
    rng = random.Random(f"t1jax scripts {experiment.seed}")
    scripts = []
    for instance in itertools.islice(
        instances("train", experiment.tasks.seed), experiment.sft.tasks
    ):
        oracle = rng.random() < experiment.sft.oracle_share
        scripts.append(instance.solution if oracle else rng.choice(instance.flawed))
    return scripts


def run_scripts(experiment: Experiment, chat: Chat, workdir: Path) -> tuple[list[Stream], float]:
    """Runs the scripts in sandboxes; returns their streams and the share of them that resolved."""
    generate(workdir / "tasks", "train", experiment.sft.tasks, experiment.tasks.seed)
    tasks = load_tasks(workdir / "tasks")
    sampler = ScriptSampler(chat, dict(enumerate(choose_scripts(experiment))))
    config = CollectConfig(
        episode=dataclasses.replace(experiment.episode, protocol="bash", history="tokens"),
        temperature=1.0,
        reward_kind="binary",
        reward_scale=1.0,
        concurrency=16,
        max_attempts=3,
        max_infra_share=experiment.rollout.max_infra_share,
    )
    trials = [Trial(task, number) for number, task in enumerate(tasks)]
    with open_sandboxes(experiment.sandbox) as make_sandbox:
        done = asyncio.run(collect(trials, make_sandbox, sampler, chat, config))
    unfinished = [t for t in done if t.status != "submitted" or t.reward is None]
    if unfinished:
        raise ConfigError(
            f"the script of {unfinished[0].task} ended as {unfinished[0].status or 'given up'}: "
            "widen the limits of episode"
        )
    resolved = sum(t.resolved for t in done) / len(done)
    return [Stream(t.tokens, t.sampled) for t in done], resolved


def copy_exercises(chat: Chat, count: int, seed: int) -> list[Stream]:
    """Prompts of one to six names, and a reply that repeats them."""
    rng = random.Random(f"t1jax copies {seed}")
    sequences = []
    for _ in range(count):
        text = "".join(f" {name}" for name in rng.sample(NAMES, rng.randint(1, MAX_COPIES)))
        prompt, reply = chat.opening(SYSTEM["bash"], text), chat.reply(text)
        tokens = np.concatenate([prompt, reply])
        sequences.append(Stream(tokens, np.arange(len(tokens)) >= len(prompt)))
    return sequences


def pack(sequences: Iterable[Stream], length: int) -> list[Examples]:
    """Rows of `length` tokens that hold as many whole sequences as fit, in order, as segments 1, 2, ..."""
    rows, row, used = [], None, length + 1
    for tokens, imitated in sequences:
        n = len(tokens)
        if n > length:
            raise ConfigError(
                f"a sequence of {n} tokens does not fit rows of {length}: sft.row_length"
            )
        if used + n > length:
            row = Examples(
                *(np.zeros(length, t) for t in (np.int32, np.int32, np.int32, np.float32))
            )
            rows.append(row)
            used = segment = 0
        place, segment = slice(used, used + n), segment + 1
        row.tokens[place], row.positions[place] = tokens, np.arange(n)
        row.segments[place], row.weights[place] = segment, imitated
        used += n
    return rows


def batches(rows: Sequence[Examples], size: int, seed: int) -> grain.MapDataset:
    """Batch number i, for any i: the rows in an order drawn anew each epoch."""
    if len(rows) < size:
        raise ConfigError(
            f"{len(rows)} rows of examples do not fill a batch of {size}: more trials are needed, or a "
            "smaller sft.batch"
        )
    return grain.MapDataset.source(rows).seed(seed).shuffle().repeat().batch(size)


def sft(experiment: Experiment, workdir: Path, command_line: str) -> dict:
    """Trains and writes `workdir`/policy and its record, `workdir`/SFT.json; returns the record."""
    started, c = time.time(), experiment.sft
    if experiment.episode.history != "tokens":
        raise ConfigError(
            f"episode.history={experiment.episode.history}: what is imitated is written as tokens"
        )
    mesh = make_mesh(experiment.mesh)
    chat = make_chat(experiment)
    length = c.row_length
    copies = pack(copy_exercises(chat, 100 * c.batch, experiment.seed), length)
    if c.trajectories:
        sequences, counts = read_recorded(experiment, chat)
        source = {"trajectories": dict(counts)}
    else:
        sequences, resolved = run_scripts(experiment, chat, workdir)
        source = {"scripts_resolved": resolved}
    data = digest(np.concatenate([2 * s.tokens + s.imitated for s in sequences]))
    print(f"{len(sequences)} trials after {time.time() - started:.0f} s: {source}", file=sys.stderr)
    phases = [
        (c.copy_steps, batches(copies, c.batch, experiment.seed)),
        (c.steps, batches(pack(sequences, length), c.batch, experiment.seed + 1)),
    ]
    total = c.copy_steps + c.steps
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, c.learning_rate, min(WARMUP, total - 1), total, c.learning_rate * FLOOR
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b1=0.9, b2=0.98, weight_decay=0.1, mask=decays),
    )
    step_fn = make_imitate_step(experiment.model, optimizer, c.batch // mesh.size, mesh)

    params = init_policy(experiment.model, jax.random.key(experiment.seed))
    params, opt_state = replicate((params, jax.jit(optimizer.init)(params)), mesh)
    checkpoints = Checkpoints(workdir / "checkpoints", keep=1)
    found = checkpoints.restore((params, opt_state))
    begin, tokens, elapsed = 0, 0, 0.0
    if found:
        if found.host["data"] != data:
            raise ConfigError(
                f"{workdir} was begun with other trials: put them back, or choose another --workdir"
            )
        params, opt_state = found.state
        begin, tokens, elapsed = found.step, found.host["tokens"], found.host["seconds"]
        print(f"resuming at step {begin} of {total}", file=sys.stderr)
    writer = MetricsWriter(workdir, begin - 1 if found else None)
    bar = progress_bar()
    task = bar.add_task("imitating", total=total, completed=begin, note="")
    bar.start()
    for step in range(begin, total):
        copying = step < phases[0][0]
        examples = phases[0][1][step] if copying else phases[1][1][step - phases[0][0]]
        params, opt_state, metrics = step_fn(params, opt_state, examples)
        tokens += int(np.count_nonzero(examples.segments))
        seconds = elapsed + time.time() - started
        if step % 20 == 0 or step + 1 == total:
            values = {f"sft/{name}": float(value) for name, value in metrics.items()}
            values |= {"sft/copying": int(copying), "time/elapsed_s": seconds}
            writer.write(step, values)
            bar.update(task, note=f"loss {values['sft/loss']:.4f}")
        bar.update(task, completed=step + 1)
        if (step + 1) % c.checkpoint_every == 0 and step + 1 < total:
            host = {"tokens": tokens, "seconds": seconds, "data": data}
            checkpoints.save(step + 1, (params, opt_state), host)
    bar.stop()
    writer.close()
    save_params(workdir / "policy", params, dataclasses.asdict(experiment.model))
    record = {
        "command": command_line,
        "experiment": dataclasses.asdict(experiment),
        "data": data,
        **source,
        "steps": total,
        "tokens": tokens,
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "loss": values["sft/loss"],
        "seconds": round(seconds),
    }
    write_json(workdir / "SFT.json", record)
    return record


def main() -> None:
    experiment = read_experiment(CONFIG.value)
    workdir = command.workdir_path(WORKDIR.value)
    write_config(CONFIG.value, workdir)
    print(json.dumps(sft(experiment, workdir, " ".join(["python -m t1jax.sft", *sys.argv[1:]]))))


if __name__ == "__main__":
    CONFIG, WORKDIR = command.define_config_flags()
    command.run(main)
