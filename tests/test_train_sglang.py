"""The whole loop with an SGLang engine in place of the embedded sampler."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from t1jax.metrics import read_metrics
from t1jax.rollout import store

ROOT = Path(__file__).parent.parent


def engines() -> set[int]:
    """Processes that are engines, of whomever."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"launch/engine/server.py" in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
        except OSError:
            continue
    return found


@pytest.mark.engine
def test_a_run_on_an_engine(tmp_path):
    """Exact ids, the engine's experts replayed, a new version each step, an audit, and no process left."""
    before, workdir = engines(), tmp_path / "run"
    arguments = [
        "--config=configs/tiny.py:debug,sampler=sglang",
        f"--workdir={workdir}",
        "--config.train.flips_every=1",
    ]
    command = [sys.executable, "-m", "t1jax.train", *arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert engines() <= before
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["drift"] == 0 and result["gap"] <= 1e-3
    assert result["eval_before"]["trials"] == result["eval_after"]["trials"] == 16
    lines = read_metrics(workdir)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for line in lines:
        assert line["r3/flips"] <= 1e-3 and line["r3/rows_missing"] == 0
        assert line["tito/drift"] == line["tito/rewritten"] == 0
    for step, trajectory in store.read_run(workdir / "trajectories"):
        assert set(trajectory.versions.tolist()) == {step}
    audit = [sys.executable, "-m", "t1jax.audit", f"--run={workdir}"]
    done = subprocess.run(audit, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
