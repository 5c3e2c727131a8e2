"""An honest run passes its audit; one changed in any place does not, and the place is named."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict
from test_batch import trajectory, turn

from t1jax.audit import Offence, audit_run, check_step, gae
from t1jax.experiment import read_experiment
from t1jax.rollout import store

ROOT = Path(__file__).parent.parent
TEMPLATE = "configs/assets/tiny/chat_template_drops.jinja"
pytestmark = pytest.mark.slow


def python(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A real run of two steps, whose histories are text."""
    workdir = tmp_path_factory.mktemp("run") / "stitched"
    changes = {
        "initial_policy": "configs/assets/tiny/sft",
        "model.num_layers": 4,
        "model.hidden_size": 64,
        "model.num_experts": 8,
        "episode.history": "stitched",
        "chat_template": TEMPLATE,
        "train.steps": 2,
        "train.parity_band": 50.0,  # the policy never saw a history without thoughts
        "evaluate.before": False,
        "evaluate.after": False,
    }
    flags = [f"--config.{name}={value}" for name, value in changes.items()]
    done = python("t1jax.train", "--config=configs/tiny.py:debug", f"--workdir={workdir}", *flags)
    assert done.returncode == 0, done.stderr
    return workdir


def test_an_honest_run_passes(run):
    done = python("t1jax.audit", f"--run={run}")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["steps"] == 2 and result["drift"] == 0
    stored = [t for _, t in store.read_run(run / "trajectories")]
    assert result["sampled"] == sum(t.sampled.sum() for t in stored) > 500
    assert result["replies"] == sum(len(t.turns) for t in stored)
    assert result["joins"]["normalized"] == sum(result["drops"].values()) > 10
    assert "drift 0.0000%" in done.stderr and "(s,u) = " in done.stderr


def last_turn(t, **changes):
    return dataclasses.replace(
        t, turns=(*t.turns[:-1], dataclasses.replace(t.turns[-1], **changes))
    )


def other_id(t):
    sampled = t.turns[-1].sampled.copy()
    sampled[0] = (sampled[0] + 1) % 500
    return last_turn(t, sampled=sampled)


def context_as_sampled(t):
    """The id before a reply counts as said, too, as where a mask is off by one."""
    first = t.turns[0]
    moved = dataclasses.replace(
        first,
        context=first.context[:-1],
        sampled=np.append(first.context[-1:], first.sampled),
        logprobs=np.append(np.float32(-1), first.logprobs),
    )
    return dataclasses.replace(t, turns=(moved, *t.turns[1:]))


def experts(change):
    def apply(t):
        rows = t.experts.copy()
        return dataclasses.replace(t, experts=change(rows))

    return apply


def same_expert_twice(rows):
    rows[3, 1, 0] = rows[3, 1, 1]
    return rows


def unknown_expert(rows):
    rows[3, 1, 0] = 99
    return rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_id, "holds .* ids that the sampler did not say"),
        (context_as_sampled, "turn 0 holds .* ids that the sampler did not say"),
        (lambda t: last_turn(t, version=0), "tokens of weights 0"),
        (lambda t: last_turn(t, join="split"), "is joined by 'split'"),
        (lambda t: last_turn(t, logprobs=t.turns[-1].logprobs + 9), "was sampled with log-prob"),
        (lambda t: last_turn(t, logprobs=t.turns[-1].logprobs - 99), "trainer and sampler differ"),
        (experts(lambda rows: rows[:-1]), "rows of experts for"),
        (experts(same_expert_twice), r"token 3, layer 1 has experts \[(\d), \1\]"),
        (experts(unknown_expert), "token 3, layer 1 has experts .*99"),
        (experts(lambda rows: rows[:, :2]), r"experts \(2, 2\)"),
        (lambda t: dataclasses.replace(t, reward=1.0), "reward 1.0, the verdict gives"),
        (lambda t: dataclasses.replace(t, trial=t.trial + 1), "trials are not there once each"),
        (lambda t: dataclasses.replace(t, chunk=1), "are not there once each"),
    ],
)
def test_a_changed_trajectory_is_named(run, tmp_path, change, message):
    """In step 1, the first trial of several turns."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("checkpoints", "tensorboard"))
    stored = store.read_step(copy / "trajectories", 1)
    victim = next(i for i, t in enumerate(stored) if len(t.turns) > 1)
    stored[victim] = change(stored[victim])
    store.write_step(copy / "trajectories", 1, stored)
    with pytest.raises(Offence, match="step 1, .*" + message):
        audit_run(copy)


@pytest.mark.parametrize("name", ["values", "advantages", "returns", "old_logp"])
def test_a_changed_inference_is_named(run, tmp_path, name):
    copy = tmp_path / "run"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("checkpoints", "tensorboard"))
    trained = [t for t in store.read_step(run / "trajectories", 1) if t.turns]
    inferred = store.read_advantages(run / "advantages", 1)
    arrays = {
        key: np.zeros((len(trained), max(len(t.tokens) for t in trained)), np.float32)
        for key in store.INFERRED
    }
    for row, t in enumerate(trained):
        for key, values in inferred[t.trial, t.chunk].items():
            arrays[key][row, : len(values)] = values
    row = 2
    arrays[name][row, np.flatnonzero(trained[row].sampled)[1]] += 100
    store.write_advantages(copy / "advantages", 1, trained, arrays)
    expected = "differ by" if name == "old_logp" else "its values give"
    with pytest.raises(Offence, match=f"trial {trained[row].trial}, .*{expected}"):
        audit_run(copy)


def test_what_is_missing_is_named(run, tmp_path):
    done = python("t1jax.audit", f"--run={tmp_path}")
    assert done.returncode == 1 and "config.json cannot be read" in done.stderr
    copy = tmp_path / "run"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("checkpoints", "tensorboard"))
    store.step_path(copy / "trajectories", 0).unlink()
    done = python("t1jax.audit", f"--run={copy}")
    assert done.returncode == 1
    assert done.stderr.strip().endswith("step 0 was trained on, but its trajectories are not there")


def test_a_chunk_without_the_one_before_it_is_named(run):
    experiment = read_experiment(ConfigDict(json.loads((run / "config.json").read_text())))
    stored = store.read_step(run / "trajectories", 0)
    again = dataclasses.replace(stored[3], chunk=2)
    with pytest.raises(ValueError, match=f"trial {again.trial}, chunk 2: the chunk before"):
        check_step(experiment, 0, [*stored[:4], again, *stored[4:]])
    other = dataclasses.replace(stored[3], chunk=1, reward=-1.0)
    with pytest.raises(ValueError, match="another outcome than the chunk before it"):
        check_step(experiment, 0, [*stored[:4], other, *stored[4:]])


def test_advantages_by_hand():
    """Traps 42: context takes no part. Two sampled tokens, one context between them and a third."""
    t = trajectory(turn([1], [2, 3], [-1, -1]), turn([4, 5], [6], [-1]), reward=1.0)
    values = np.array([9, 0.1, 0.2, 9, 9, 0.3])
    advantages, returns = gae(t, values, 1.0, 0.95)
    np.testing.assert_allclose(advantages, [0, 0.82675, 0.765, 0, 0, 0.7], atol=1e-9)
    np.testing.assert_allclose(returns, [0, 0.92675, 0.965, 0, 0, 1.0], atol=1e-9)
