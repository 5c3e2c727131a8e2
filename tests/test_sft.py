import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from configs import tiny
from t1jax import sft
from t1jax.agent.chat import Chat
from t1jax.checkpoint import load_params
from t1jax.experiment import read_experiment
from t1jax.metrics import read_metrics
from t1jax.run import abstract_policy

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def chat():
    return Chat("configs/assets/tiny/tokenizer.json")


def debug_experiment(**changes):
    config = tiny.get_config("debug")
    config.update_from_flattened_dict(changes)
    return read_experiment(config)


def test_packing_keeps_every_token_once():
    rng = np.random.default_rng(0)
    streams = []
    for n in rng.integers(1, 20, 50):
        streams.append(sft.Stream(rng.integers(1, 99, n), rng.random(n) < 0.5))
    rows = sft.pack(streams, 20)
    found = []
    for row in rows:
        for segment in range(1, row.segments.max() + 1):
            place = row.segments == segment
            np.testing.assert_array_equal(row.positions[place], np.arange(place.sum()))
            found.append((row.tokens[place], row.weights[place]))
        assert not row.weights[row.segments == 0].any()
    assert len(found) == len(streams)
    for (tokens, weights), stream in zip(found, streams, strict=True):
        np.testing.assert_array_equal(tokens, stream.tokens)
        np.testing.assert_array_equal(weights, stream.imitated)


def test_a_sequence_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="9 tokens does not fit rows of 8"):
        sft.pack([sft.Stream(np.ones(9, int), np.ones(9, bool))], 8)


def test_copy_exercises_repeat_the_prompt(chat):
    for stream in sft.copy_exercises(chat, 20, seed=0):
        prompt = chat.decode(stream.tokens[~stream.imitated])
        reply = chat.decode(stream.tokens[stream.imitated]).removesuffix("<|im_end|>")
        assert f"user\n{reply}<|im_end|>" in prompt


def test_the_oracle_share_is_as_configured():
    share = {}
    for wanted in (0.0, 0.35, 1.0):
        experiment = debug_experiment(**{"sft.tasks": 1200, "sft.oracle_share": wanted})
        scripts = sft.choose_scripts(experiment)
        assert scripts == sft.choose_scripts(experiment)
        pairs = zip(scripts, sft.instances("train", experiment.tasks.seed), strict=False)
        share[wanted] = np.mean([script == instance.solution for script, instance in pairs])
    assert share[0.0] == 0 and share[1.0] == 1 and abs(share[0.35] - 0.35) < 0.05


def command(workdir):
    main = [sys.executable, "-m", "t1jax.sft", "--config=configs/tiny.py:debug"]
    return [*main, f"--workdir={workdir}"]


def run(workdir) -> str:
    """In a process of its own: how XLA:CPU splits its work, and so the last bit, depends on the devices."""
    done = subprocess.run(command(workdir), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stderr


def kill_and_go_on(workdir):
    with subprocess.Popen(command(workdir), cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 200
        while not (workdir / "checkpoints/000010").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.kill()
    assert process.returncode == -signal.SIGKILL and not (workdir / "policy").exists()
    assert "resuming at step 10 of 25" in run(workdir)


@pytest.mark.slow
def test_a_short_run_learns_and_repeats_itself(tmp_path):
    names = ("a", "b", "killed")
    run(tmp_path / "a")
    run(tmp_path / "b")
    kill_and_go_on(tmp_path / "killed")
    a, *others = (
        [(m["step"], m["sft/loss"], m["sft/grad_norm"]) for m in read_metrics(tmp_path / name)]
        for name in names
    )
    assert all(other == a for other in others) and a[-1][1] < a[0][1] - 0.5
    like = abstract_policy(debug_experiment())
    a, *others = (load_params(tmp_path / name / "policy", like) for name in names)
    for other in others:
        for x, y in zip(*map(jax.tree.leaves, (a, other)), strict=True):
            np.testing.assert_array_equal(x, y)
    record = json.loads((tmp_path / "a/SFT.json").read_text())
    assert record["tokens"] < 25 * 8 * 256 and 0.2 < record["scripts_resolved"] < 0.5
