"""The whole loop on real sandboxes with a tiny random policy.

An asynchronous run without a correction (trap 73) cannot be configured: steps are synchronous, which
`test_stored_trajectories_are_whole` sees in the weight version of every turn.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from configs import tiny
from t1jax.checkpoint import Checkpoints, load_params
from t1jax.experiment import read_experiment
from t1jax.guard import GuardError, check_parity
from t1jax.mesh import MeshConfig, make_mesh
from t1jax.metrics import read_metrics
from t1jax.rollout import store
from t1jax.run import abstract_policy, first_state

ROOT = Path(__file__).parent.parent
SMALL_DISK = "7500k"  # holds the run and one checkpoint, not two
ENV = os.environ | {
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
    "JAX_PLATFORMS": "cpu",
}


def start(workdir: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "t1jax.train", "--config=configs/tiny.py:debug"]
    return subprocess.Popen(
        [*command, f"--workdir={workdir}"],
        cwd=ROOT,
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(run folder, its last line of output) of an uninterrupted run."""
    workdir = tmp_path_factory.mktemp("run") / "whole"
    process = start(workdir)
    out, err = process.communicate(timeout=580)
    assert process.returncode == 0, err
    return workdir, json.loads(out.splitlines()[-1])


def without_clock(workdir: Path) -> list[dict]:
    return [
        {name: value for name, value in line.items() if not name.startswith("time/")}
        for line in read_metrics(workdir)
    ]


def final_state(workdir: Path):
    state = first_state(read_experiment(tiny.get_config("debug")), make_mesh(MeshConfig(2)))
    return Checkpoints(workdir / "checkpoints", 2).restore(state).state


@pytest.mark.slow
def test_a_run_leaves_its_folder(finished):
    workdir, result = finished
    assert result["drift"] == 0 and result["gap"] < 1e-4
    assert result["eval_before"]["trials"] == result["eval_after"]["trials"] == 16
    assert set(result["eval_before"]["families"]) == set(result["eval_after"]["families"])
    lines = read_metrics(workdir)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for line in lines:
        assert line["r3/rows_missing"] == 0 and line["gap/engine_max"] < 1e-4
        assert line["guard/nonfinite"] == 0
    assert lines[0]["gap/movement"] == 0  # the critic warms up, the actor stands still
    assert lines[2]["ppo/ratio"] == pytest.approx(1, abs=1e-5) and lines[2]["ppo/clip_frac"] == 0
    assert (workdir / "plots/curves.png").stat().st_size > 10_000
    assert list((workdir / "tensorboard").iterdir())
    policy = load_params(
        workdir / "policy", abstract_policy(read_experiment(tiny.get_config("debug")))
    )
    for a, b in zip(*map(jax.tree.leaves, (policy, final_state(workdir).actor)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_stored_trajectories_are_whole(finished):
    workdir, _ = finished
    assert store.steps(workdir / "trajectories") == [0, 1, 2, 3]
    for step in range(4):
        trajectories = store.read_step(workdir / "trajectories", step)
        assert [t.trial for t in trajectories] == list(range(step * 16, step * 16 + 16))
        for trajectory in trajectories:
            assert len(trajectory.experts) == len(trajectory.tokens) - 1
            assert set(trajectory.versions) == {step}


@pytest.mark.slow
def test_a_killed_run_ends_as_an_unkilled_one(finished, tmp_path):
    whole, _ = finished
    workdir = tmp_path / "killed"
    process = start(workdir)
    deadline = time.monotonic() + 400
    while len(read_metrics(workdir)) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(
        signal.SIGKILL
    )  # after step 2, in step 3; the checkpoint is of step 1's end
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert [p.name for p in (workdir / "checkpoints").iterdir()] == ["000002"]
    again = start(workdir)
    _out, err = again.communicate(timeout=500)
    assert again.returncode == 0, err
    assert "resuming at step 2 of 4" in err
    assert without_clock(workdir) == without_clock(whole)
    for a, b in zip(*map(jax.tree.leaves, (final_state(whole), final_state(workdir))), strict=True):
        np.testing.assert_array_equal(a, b)
    for name in ("evaluation_before.json", "evaluation_after.json"):
        assert (workdir / name).read_text() == (whole / name).read_text()
    left = [p for p in workdir.rglob("tmp-*") if not p.is_relative_to(workdir / "tasks")]
    assert left == []


@pytest.mark.slow
def test_a_run_cut_by_a_full_disk_goes_on(finished, tmp_path):
    whole, _ = finished
    command = f'"{sys.executable}" -m t1jax.train --config=configs/tiny.py:debug --workdir="$0/run"'
    script = f"""
        mount -t tmpfs -o size={SMALL_DISK} none "$0" && ! {command} 2> "$1/first.log" &&
        mount -o remount,size=1g "$0" && {command} && cp -r "$0/run" "$1/run"
    """
    (disk, out) = tmp_path / "disk", tmp_path / "out"
    disk.mkdir(), out.mkdir()
    namespaces = "-m" if os.geteuid() == 0 else "-rm"
    done = subprocess.run(
        ["unshare", namespaces, "sh", "-c", script, disk, out],
        cwd=ROOT,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=500,
    )
    errors = [e for e in (out / "first.log").read_text().splitlines() if e.startswith("error: ")]
    assert done.returncode == 0, done.stderr
    assert len(errors) == 1 and ("No space left" in errors[0] or "disk is full" in errors[0])
    assert "resuming at step" in done.stderr
    assert without_clock(out / "run") == without_clock(whole)


def test_a_stale_sampler_is_caught_before_the_update():
    from t1jax.batch import _empty

    batch = _empty(2, 4, 1, 1)
    batch.sampled[1, 2], batch.sampler_logp[1, 2], batch.trial[1] = True, -1.0, 7
    old = np.zeros((2, 4), np.float32)
    old[1, 2] = -1.00001
    check_parity(1e-4, old, batch, 0)
    old[1, 2] = -1.5
    with pytest.raises(GuardError, match=r"step 3: .* 0.5 nats at token 2 of trial 7"):
        check_parity(1e-4, old, batch, 3)
    old[1, 2] = np.nan
    with pytest.raises(GuardError):
        check_parity(1e-4, old, batch, 3)


def test_a_new_run_starts_with_fresh_moments_and_a_silent_critic():
    """Trap 61: only weights are taken over."""
    state = first_state(read_experiment(tiny.get_config()), make_mesh(MeshConfig(2)))
    for moments in (state.actor_opt, state.critic_opt):
        assert not any(np.any(x) for x in jax.tree.leaves(moments))
    assert not np.any(state.critic["params"]["value"])
    for a, b, c in zip(
        *(
            jax.tree.leaves(p["params"]["trunk"])
            for p in (state.actor, state.critic, state.behaviour)
        ),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)
