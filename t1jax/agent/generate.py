"""Seeded task folders in the Harbor format. Train and evaluation instances are disjoint by construction:
a digest of what an instance asks for decides which of the two it belongs to.
"""

import hashlib
import itertools
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from t1jax.agent.families import FAMILIES, Instance

Split = Literal["train", "eval"]
EVAL_SHARE = 0.25  # of all possible instances
CHECKS = Path(__file__).with_name("checks.sh")

TASK_TOML = """\
version = "1.0"

[metadata]
family = "{family}"
split = "{split}"
seed = {seed}

[agent]
timeout_sec = 60.0

[verifier]
timeout_sec = 30.0

[environment]
workdir = "/app"
cpus = 1
memory_mb = 512
storage_mb = 16
network_mode = "no-network"
"""
DOCKERFILE = "FROM debian:bookworm-slim\nWORKDIR /app\nCOPY files .\n"


def split_of(instance: Instance) -> Split:
    """Where an instance belongs, whatever the seed that drew it."""
    digest = hashlib.sha256(f"{instance.family}/{instance.instruction}".encode()).digest()
    return "eval" if digest[0] < 256 * EVAL_SHARE else "train"


def instances(split: Split, seed: int) -> Iterator[Instance]:
    """Endless instances of one split, the families in turn, none twice."""
    rng = random.Random(f"t1jax tasks {split} {seed}")
    seen = set()
    for draw in itertools.cycle(FAMILIES.values()):
        while True:
            instance = draw(rng)
            key = (instance.instruction, *instance.files.values())
            if split_of(instance) == split and key not in seen:
                break
        seen.add(key)
        yield instance


def generate(out: Path, split: Split, count: int, seed: int) -> None:
    """Writes `count` task folders into `out`, whole or not at all; leaves an existing `out` alone."""
    out = Path(out)
    if out.exists():
        return
    tmp = out.with_name(f"tmp-{out.name}")
    shutil.rmtree(tmp, ignore_errors=True)
    for index, instance in enumerate(itertools.islice(instances(split, seed), count)):
        write_task(tmp / f"{index:05d}-{instance.family}", instance, split, seed)
    tmp.rename(out)


def write_task(path: Path, instance: Instance, split: Split, seed: int) -> None:
    """Writes one Harbor task folder."""
    files = path / "environment/files"
    for folder in (files, path / "tests", path / "solution"):
        folder.mkdir(parents=True)
    (path / "task.toml").write_text(
        TASK_TOML.format(family=instance.family, split=split, seed=seed)
    )
    (path / "instruction.md").write_text(instance.instruction + "\n")
    (path / "environment/Dockerfile").write_text(DOCKERFILE)
    for name, text in instance.files.items():
        (files / name).write_text(text)
    shutil.copyfile(CHECKS, path / "tests/checks.sh")
    (path / "tests/test.sh").write_text(test_script(instance))
    (path / "solution/solve.sh").write_text(
        "\n".join(("#!/bin/bash", "set -e", *instance.solution)) + "\n"
    )


def test_script(instance: Instance) -> str:
    """The verifier: one `check` an assertion, then the report."""
    checks = [f"check '{name}' {predicate}" for name, predicate in instance.checks.items()]
    return "\n".join(("#!/bin/bash", "cd /app", ". /tests/checks.sh", *checks, "report")) + "\n"
