"""Writes the trials of a run for other tools: ATIF documents, or token records as Harbor's trainers read them.

    python -m t1jax.export --run=DIR --out=DIR [--step=N] [--format=atif|rollout_details]

One JSON file a trial, OUT/step_000012-trial_000000773.json (further chunks beside it, see atif.py). An export that was
interrupted is completed by the same command: files newer than their step's are kept. A trial without a single reply
has no file. The last line printed is a JSON object that counts them.
"""

import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import orjson
from absl import flags

from t1jax import command
from t1jax.atif import documents, file_names, trial_result
from t1jax.audit import read_config
from t1jax.experiment import ConfigError, Experiment
from t1jax.files import write_bytes
from t1jax.rollout import store
from t1jax.run import make_chat
from t1jax.transcript import make_transcribe
from t1jax.types import Trajectory

MARK = ".export"  # says which run and which format a folder holds

# A trial's chunks and its name -> the contents of its files by name, the first file first.
Render = Callable[[Sequence[Trajectory], str], dict[str, dict]]


def make_render(experiment: Experiment, kind: str, run: str) -> Render:
    """Raises ConfigError for runs that cannot be told so."""
    history, protocol = experiment.episode.history, experiment.episode.protocol
    if history == "retokenized":
        raise ConfigError(
            "episode.history=retokenized: what the run kept is not what was sampled, nothing can be exported"
        )
    if kind == "rollout_details":
        return lambda chunks, name: {f"{name}.json": trial_result(chunks, name)}
    transcribe = make_transcribe(make_chat(experiment), history)

    def render(chunks: Sequence[Trajectory], name: str) -> dict[str, dict]:
        contents = documents(chunks, transcribe(chunks), protocol, run, name)
        return dict(zip(file_names(name, len(chunks)), contents, strict=True))

    return render


def trials(run: Path, step: int) -> Iterator[list[Trajectory]]:
    """The chunks of each trial of a step, a few trials in memory at a time. Raises StoreError."""
    stored = store.read(store.step_path(run / "trajectories", step))
    for _, chunks in itertools.groupby(stored, key=lambda t: t.trial):
        yield list(chunks)


def export_step(run: Path, step: int, render: Render, out: Path) -> Counter:
    """Writes a step's trials; counts those written, kept and without a reply. Raises StoreError, OSError."""
    counts = Counter(written=0, kept=0, without_reply=0)
    changed = store.step_path(run / "trajectories", step).stat().st_mtime_ns
    for chunks in trials(run, step):
        name = f"step_{step:06d}-trial_{chunks[0].trial:09d}"
        first = out / f"{name}.json"
        if not chunks[0].turns:
            counts["without_reply"] += 1
        elif first.exists() and first.stat().st_mtime_ns > changed:
            counts["kept"] += 1
        else:
            try:
                files = render(chunks, name)
            except ValueError as error:
                raise store.StoreError(f"step {step} of {run}: {error}") from error
            # The first file last: where it stands, all of the trial does.
            for file, content in reversed(files.items()):
                write_bytes(out / file, orjson.dumps(content) + b"\n")
            counts["written"] += 1
    return counts


def chosen_steps(run: Path, step: int | None) -> list[int]:
    """The steps to export. Raises ConfigError where there are none, or not that one."""
    there = store.steps(run / "trajectories")
    if not there:
        raise ConfigError(f"{run} has no recorded trajectories")
    if step is not None and step not in there:
        raise ConfigError(f"--step={step} is not recorded, there are {there[0]} to {there[-1]}")
    return there if step is None else [step]


def mark(out: Path, run: Path, kind: str) -> None:
    """Makes the folder this export's own. Raises ConfigError where it holds another, or other files."""
    mine = {"run": str(run.resolve()), "format": kind}
    path = out / MARK
    if path.exists():
        try:
            theirs = json.loads(path.read_text())
        except ValueError:
            theirs = None
        if theirs != mine:
            raise ConfigError(f"--out={out} holds another export: name another folder")
    elif any(out.iterdir()):
        raise ConfigError(f"--out={out} holds other files: name another folder")
    else:
        write_bytes(path, orjson.dumps(mine))


def main() -> None:
    run = Path(RUN.value)
    experiment = read_config(run)
    steps = chosen_steps(run, STEP.value)
    render = make_render(experiment, FORMAT.value, run.resolve().name)
    out = command.workdir_path(OUT.value)
    mark(out, run, FORMAT.value)
    counts = Counter(written=0, kept=0, without_reply=0)
    for step in steps:
        counts.update(export_step(run, step, render, out))
        print(f"step {step}: {counts['written']} trials written", file=sys.stderr)
    print(json.dumps({"steps": len(steps), **counts}))


if __name__ == "__main__":
    RUN = flags.DEFINE_string("run", None, "The run's folder.", required=True)
    OUT = flags.DEFINE_string("out", None, "Where the files go.", required=True)
    STEP = flags.DEFINE_integer("step", None, "One step alone.", lower_bound=0)
    FORMAT = flags.DEFINE_enum("format", "atif", ["atif", "rollout_details"], "What to write.")
    command.run(main)
