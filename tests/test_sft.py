import asyncio
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from fakes import COLLECT, SUBMIT, ScriptedSampler, bash, generated, need_sandbox, replies

from configs import tiny
from t1jax import sft
from t1jax.agent.action import SYSTEM
from t1jax.agent.chat import Chat
from t1jax.atif import documents
from t1jax.checkpoint import load_params
from t1jax.experiment import ConfigError, read_experiment
from t1jax.metrics import read_metrics
from t1jax.recorded import read_recorded
from t1jax.rollout.collect import Trial, collect
from t1jax.run import abstract_policy
from t1jax.sandbox.namespace import NamespaceSandbox
from t1jax.transcript import make_transcribe

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


SAID = ((bash("cat note"), "<|im_end|>"), ("hm", "no block"), (SUBMIT, None))


def document(task="Do it.", said=SAID, **root) -> dict:
    """ATIF as another harness may write it, without ids."""
    steps = [{"source": "user", "message": task}]
    for reply, heard in said:
        steps.append({"source": "agent", "message": reply})
        if heard is not None:
            steps[-1]["observation"] = {"results": [{"content": heard}]}
    return {
        "schema_version": "ATIF-v1.8",
        "agent": {"name": "other", "version": "1"},
        "steps": [{"step_id": i} | step for i, step in enumerate(steps, 1)],
        **root,
    }


def write(folder, **documents) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_recorded_replies_are_imitated_and_context_is_not(chat, tmp_path):
    copied = document()
    copied["steps"][1]["is_copied_context"] = True
    write(
        tmp_path,
        a=document(),
        b=document(extra={"resolved": False}),
        c=document(said=[("no action at all", None)]),
        d=document(task="long " * 500),
        e=copied,
    )
    (tmp_path / "tmp-f.json").write_text('{"half":')
    experiment = debug_experiment(**{"sft.trajectories": str(tmp_path)})
    (stream, later), counts = read_recorded(experiment, chat)
    assert counts == {"imitated": 2, "failed": 1, "no_action": 1, "too_long": 1}
    parts = [chat.opening(SYSTEM["bash"], "Do it.")]
    for reply, heard in SAID:
        parts += [chat.reply(reply), *([] if heard is None else [chat.observation(heard)])]
    np.testing.assert_array_equal(stream.tokens, np.concatenate(parts))
    np.testing.assert_array_equal(later.tokens, stream.tokens)
    edges = np.cumsum([len(part) for part in parts])
    segments = np.searchsorted(edges, np.arange(edges[-1]), "right")
    np.testing.assert_array_equal(stream.imitated, segments % 2 == 1)
    np.testing.assert_array_equal(later.imitated, stream.imitated & (segments > 1))


def test_an_exported_trial_is_the_stream_that_was_sampled(chat, tmp_path):
    need_sandbox()
    pairs = generated(tmp_path / "tasks", 3)
    sampler = ScriptedSampler(chat, {i: replies(s) for i, (_, s) in enumerate(pairs)})
    trials = [Trial(task, i) for i, (task, _) in enumerate(pairs)]
    done = asyncio.run(collect(trials, NamespaceSandbox.start, sampler, chat, COLLECT))
    transcribe = make_transcribe(chat, "tokens")
    files = {str(t.trial): documents([t], transcribe([t]), "bash", "run", "name")[0] for t in done}
    folder = write(tmp_path / "atif", **files)
    experiment = debug_experiment(**{"sft.trajectories": str(folder), "sft.row_length": 1024})
    streams, counts = read_recorded(experiment, chat)
    assert counts["imitated"] == 3
    for stream, t in zip(streams, done, strict=True):
        np.testing.assert_array_equal(stream.tokens, t.tokens)
        np.testing.assert_array_equal(stream.imitated, t.sampled)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "bad.json: trajectory: lacks schema_version"),
        (document(x=1), "bad.json: trajectory: unknown key x"),
        (document(said=[("a", 1)]), r"bad.json: steps\[1\].observation.results\[0\].content: is"),
        (document(extra={"resolved": False}), "has nothing to imitate"),
    ],
)
def test_documents_that_are_none_are_named(chat, tmp_path, content, message):
    experiment = debug_experiment(**{"sft.trajectories": str(write(tmp_path, bad=content))})
    with pytest.raises(ConfigError, match=message):
        read_recorded(experiment, chat)
    (tmp_path / "bad.json").write_text('{"half":')
    with pytest.raises(ConfigError, match=r"bad.json: unexpected end of data"):
        read_recorded(experiment, chat)
    (tmp_path / "bad.json").unlink()
    with pytest.raises(ConfigError, match="holds no ATIF documents"):
        read_recorded(experiment, chat)


def command(workdir, *flags):
    main = [sys.executable, "-m", "t1jax.sft", "--config=configs/tiny.py:debug"]
    return [*main, f"--workdir={workdir}", *flags]


def run(workdir, *flags) -> str:
    """In a process of its own: how XLA:CPU splits its work, and so the last bit, depends on the devices."""
    argv = command(workdir, *flags)
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stderr


def kill_and_go_on(workdir, *flags):
    argv = command(workdir, *flags)
    with subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 200
        while not (workdir / "checkpoints/000010").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.kill()
    assert process.returncode == -signal.SIGKILL and not (workdir / "policy").exists()
    assert "resuming at step 10 of 25" in run(workdir, *flags)


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


@pytest.mark.slow
def test_recorded_trials_are_learnt_and_a_killed_run_goes_on_with_the_same(tmp_path):
    files = {f"{i:02d}": document(task=f"Do {i}.") for i in range(40)}
    flags = (f"--config.sft.trajectories={write(tmp_path / 'atif', **files)}",)
    run(tmp_path / "whole", *flags)
    kill_and_go_on(tmp_path / "killed", *flags)
    whole, killed = (
        [(m["step"], m["sft/loss"], m["sft/grad_norm"]) for m in read_metrics(tmp_path / name)]
        for name in ("whole", "killed")
    )
    assert killed == whole and whole[-1][1] < whole[0][1] - 0.5
    record = json.loads((tmp_path / "whole/SFT.json").read_text())
    assert record["trajectories"]["imitated"] == 40 and "scripts_resolved" not in record
    shutil.rmtree(tmp_path / "killed/policy")
    write(tmp_path / "atif", **{"00": document(task="Do another.")})
    again = subprocess.run(
        command(tmp_path / "killed", *flags), cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    errors = [line for line in again.stderr.splitlines() if line.startswith("error: ")]
    assert again.returncode == 1 and "was begun with other trials" in errors[0]
