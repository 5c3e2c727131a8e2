"""Honest runs pass their audit; one changed in any place does not, and the place is named."""

import dataclasses
import functools
import json
import re
import shutil
import signal
import time

import numpy as np
import pytest
from audit_fixtures import Recorded, copied, finish, start, train

from t1jax.agent.generate import generate
from t1jax.audit import Offence, audit_run, check_step
from t1jax.recompute import check_inferred
from t1jax.rollout import store
from t1jax.types import digest

TEMPLATE = "configs/assets/tiny/chat_template_drops.jinja"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Histories are text. Weights of steps 0 and 2 are there, those of step 1 are gone."""
    workdir = tmp_path_factory.mktemp("run") / "stitched"
    changes = {
        "episode.history": "stitched",
        "chat_template": TEMPLATE,
        "train.steps": 3,
        "train.warmup_steps": 0,
        "train.parity_band": 50.0,  # the policy never saw a history without thoughts
    }
    finish(train(workdir, **changes))
    return workdir


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """(run, the same as a kill left it): ids, whitened, discounted, and trials of two tasks have no verdict.

    The critic warms up in step 0; step 2 has a checkpoint, step 3 has none.
    """
    folder = tmp_path_factory.mktemp("run")
    generate(folder / "tasks", "train", 16, 0)
    for task in sorted((folder / "tasks").iterdir())[:2]:
        (task / "tests/test.sh").write_text("#!/bin/bash\n")
    changes = {
        "tasks.train": folder / "tasks",
        "ppo.whiten": True,
        "ppo.gamma": 0.9,
        "ppo.lam": 0.95,
        "train.steps": 4,
        "train.warmup_steps": 1,
    }
    workdir = folder / "tokens"
    process = train(workdir, **changes)
    while not (workdir / "checkpoints/000002").exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, err
    shutil.copytree(workdir, folder / "killed")
    _, err = finish(train(workdir, **changes))
    assert "resuming at step 2 of 4" in err
    return workdir, folder / "killed"


@pytest.fixture(scope="module")
def tokens(killed):
    return killed[0]


@pytest.fixture(scope="module")
def stitched(run):
    return Recorded(run)


@pytest.mark.slow
def test_an_honest_run_passes(run):
    out, err = finish(start("t1jax.audit", f"--run={run}"))
    result = json.loads(out.splitlines()[-1])
    assert result["steps"] == 3 and result["recomputed"] == 2 and result["drift"] == 0
    stored = [t for _, t in store.read_run(run / "trajectories")]
    assert result["sampled"] == sum(t.sampled.sum() for t in stored) > 500
    assert result["replies"] == sum(len(t.turns) for t in stored)
    assert result["joins"]["normalized"] == sum(result["drops"].values()) > 10
    assert result["gap_strict"] < 1e-4 < result["gap"]
    assert "recomputed from their weights: 2 of 3 steps" in err and "(s,u) = " in err


@pytest.mark.slow
def test_killed_resumed_whitened_discounted_runs_with_trials_given_up_pass(killed):
    whole, cut = killed
    stored = [t for _, t in store.read_run(whole / "trajectories")]
    assert sum(t.reward is None for t in stored) == 8
    result = audit_run(whole)
    assert result["steps"] == 4 and result["recomputed"] == 3
    assert result["gap"] == result["gap_strict"] < 1e-4
    result = audit_run(cut)
    assert result["steps"] >= 2 <= result["recomputed"]


@pytest.mark.slow
def test_a_step_cut_short_may_only_be_the_last(tokens, tmp_path):
    """As where a kill came between trajectories and metrics; behind a checkpoint it cannot have come."""
    copy = copied(tokens, tmp_path)
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").unlink()
    (copy / "metrics.jsonl").write_text("".join(lines[:3]))
    with pytest.raises(Offence, match="step 3 was trained on, but its metrics are not there"):
        audit_run(copy)
    shutil.rmtree(copy / "checkpoints/000004")
    assert audit_run(copy)["steps"] == 4
    store.step_path(copy / "advantages", 3).unlink()
    assert audit_run(copy)["steps"] == 4


@pytest.mark.slow
def test_a_run_killed_while_it_drops_what_is_behind_its_checkpoint_passes(tokens, tmp_path):
    copy = copied(tokens, tmp_path)
    shutil.rmtree(copy / "checkpoints/000004")
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").unlink()
    (copy / "metrics.jsonl").write_text("".join(lines[:2]))
    assert audit_run(copy)["steps"] == 4
    store.step_path(copy / "trajectories", 1).unlink()
    with pytest.raises(Offence, match="step 1 was trained on, but its trajectories are not there"):
        audit_run(copy)


@pytest.mark.slow
def test_without_the_initial_policy_fewer_steps_are_recomputed(run, tmp_path):
    copy = copied(run, tmp_path)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps(config | {"initial_policy": str(tmp_path / "no")}))
    assert audit_run(copy)["recomputed"] == 1


def last_turn(t, **changes):
    return dataclasses.replace(
        t, turns=(*t.turns[:-1], dataclasses.replace(t.turns[-1], **changes))
    )


def other_id(t):
    sampled = t.turns[-1].sampled.copy()
    sampled[0] = (sampled[0] + 1) % 500
    return last_turn(t, sampled=sampled)


def other_id_and_digest(t):
    """An id that says something else, with the digest that fits."""
    t = other_id(t)
    return last_turn(t, digest=digest(t.turns[-1].sampled))


def prose_and_digest(t):
    """A reply that was no action becomes another one: what was run does not change."""
    said = np.array([*range(40, 60)], np.int32)[: len(t.turns[-1].sampled)]
    t = last_turn(
        t, sampled=said, digest=digest(said), finish="length", action="none", command=None
    )
    return dataclasses.replace(last_turn(t, result=None), status="length")


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


def other_context(t, place):
    context = t.turns[place].context.copy()
    context[len(context) // 2] ^= 1
    turns = list(t.turns)
    turns[place] = dataclasses.replace(turns[place], context=context)
    return dataclasses.replace(t, turns=tuple(turns))


def experts(change):
    return lambda t: dataclasses.replace(t, experts=np.ascontiguousarray(change(t.experts.copy())))


def same_expert_twice(rows):
    rows[3, 1, 0] = rows[3, 1, 1]
    return rows


def unknown_expert(rows):
    rows[3, 1, 0] = 99
    return rows


def random_experts(rows):
    free = np.random.default_rng(0).random((*rows.shape[:2], 8))
    return np.argsort(free, -1)[..., : rows.shape[2]].astype(rows.dtype)


WRONG_ROWS = {
    "shifted by a row": lambda rows: np.roll(rows, 1, axis=0),
    "a row left out": lambda rows: np.concatenate([rows[:20], rows[21:], rows[-1:]]),
    "at random": random_experts,
    "layers reversed": lambda rows: rows[:, ::-1],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_id, "holds .* ids that the sampler did not say"),
        (other_id_and_digest, "its ids say"),
        (context_as_sampled, "turn 0 holds .* ids that the sampler did not say"),
        (lambda t: last_turn(t, version=0), "tokens of weights 0"),
        (lambda t: last_turn(t, join="split"), "is joined by 'split'"),
        (lambda t: last_turn(t, join="glued"), "is joined by 'glued'"),
        (lambda t: last_turn(t, join="strict"), r"joined by 'strict', dropped \(4, 0\)"),
        (lambda t: last_turn(t, drop=(0, 0)), r"joined by 'normalized', dropped \(0, 0\)"),
        (lambda t: last_turn(t, drop=(97, 0)), r"joined by 'normalized', dropped \(97, 0\)"),
        (lambda t: last_turn(t, drop=(-1, 9)), r"joined by 'normalized', dropped \(-1, 9\)"),
        (lambda t: last_turn(t, command="rm -r /"), "turn . is .* 'rm -r /', its ids say"),
        (lambda t: last_turn(t, logprobs=t.turns[-1].logprobs + 9), "was sampled with log-prob"),
        (lambda t: last_turn(t, logprobs=t.turns[-1].logprobs - 99), "trainer and sampler differ"),
        (experts(lambda rows: rows[:-1]), "rows of experts for"),
        (experts(same_expert_twice), r"token 3, layer 1 has experts \[(\d), \1\]"),
        (experts(unknown_expert), "token 3, layer 1 has experts .*99"),
        (experts(lambda rows: rows[:, :2]), r"experts \(2, 2\)"),
        (lambda t: dataclasses.replace(t, status="cancelled"), "'cancelled' cannot follow its"),
        (lambda t: dataclasses.replace(t, attempt=3), "attempt 3 of 3"),
        (lambda t: dataclasses.replace(t, task="00000-copy"), r"task and family \['00000-copy'"),
        (lambda t: dataclasses.replace(t, family="cut"), "task and family .* 'cut'.* gives"),
        (lambda t: dataclasses.replace(t, reward=1.0), "reward 1.0, the verdict gives"),
        (lambda t: dataclasses.replace(t, temperature=0.5), "temperature 0.5, the config's is 1"),
        (lambda t: dataclasses.replace(t, trial=t.trial + 1), "trials are not there once each"),
        (lambda t: dataclasses.replace(t, chunk=1), "are not there once each"),
    ],
)
def test_a_changed_trajectory_is_named(stitched, change, message):
    """In step 1, whose weights are gone."""
    with pytest.raises(ValueError, match=message):
        stitched.check(1, stitched.changed(1, change))


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        *(pytest.param(experts(change), id=name) for name, change in WRONG_ROWS.items()),
        pytest.param(functools.partial(other_context, place=0), id="first context"),
        pytest.param(functools.partial(other_context, place=1), id="later context"),
        pytest.param(prose_and_digest, id="reply, digest and action"),
    ],
)
@pytest.mark.parametrize("step", [0, 2])
def test_weights_show_what_was_read_and_under_which_experts(stitched, change, step):
    """Of text histories, whose band of 50 nats would pass anything."""
    with pytest.raises(ValueError, match=r"old_logp of token .* its experts and weights give"):
        stitched.check(step, stitched.changed(step, change))


@pytest.mark.slow
def test_without_weights_misplaced_experts_are_not_seen(stitched):
    """The limit that the docstring states."""
    assert not stitched.check(1, stitched.changed(1, experts(random_experts)))


@pytest.mark.slow
def test_contexts_are_what_the_sandbox_answered(tokens):
    """In step 3, whose weights are gone."""
    recorded = Recorded(tokens)
    assert not recorded.check(3, recorded.changed(3, lambda t: t))
    with pytest.raises(ValueError, match="the context of turn 1 is not what turn 0 came to"):
        recorded.check(3, recorded.changed(3, functools.partial(other_context, place=1)))


@pytest.mark.slow
def test_an_offence_is_one_line_with_its_place(stitched, tmp_path):
    copy = copied(stitched.run, tmp_path)
    shifted = stitched.changed(2, experts(WRONG_ROWS["shifted by a row"]))
    store.write_step(copy / "trajectories", 2, shifted)
    process = start("t1jax.audit", f"--run={copy}")
    _, err = process.communicate()
    assert process.returncode == 1 and err.count("error:") == 1
    assert re.search(r"run: step 2, trial \d+, chunk 0: old_logp of token \d+ is .* give .*$", err)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "step", "message"),
    [
        ("values", 1, "its values give"),
        ("advantages", 1, "its values give"),
        ("returns", 1, "its values give"),
        ("old_logp", 1, "differ by"),
        ("values", 2, "values of token .*its experts and weights give"),
    ],
)
def test_a_changed_inference_is_named(stitched, name, step, message):
    rows = [t for t in store.read_step(stitched.run / "trajectories", step) if t.turns]
    inferred = store.read_advantages(stitched.run / "advantages", step)
    t = rows[2]
    inferred[t.trial, t.chunk][name][np.flatnonzero(t.sampled)[1]] += 100
    with pytest.raises(ValueError, match=f"trial {t.trial}, .*{message}"):
        check_inferred(stitched.experiment, rows, inferred, stitched.recompute(step, rows))


@pytest.mark.slow
def test_tasks_are_compared_while_their_folder_is_there(run, tmp_path):
    copy = copied(run, tmp_path)
    assert audit_run(copy)["tasks_checked"]
    renamed = next((copy / "tasks/train").iterdir())
    renamed.rename(renamed.with_name("99999-other"))
    with pytest.raises(Offence, match="task and family"):
        audit_run(copy)
    shutil.rmtree(copy / "tasks")
    assert not audit_run(copy)["tasks_checked"]


@pytest.mark.slow
def test_what_is_missing_is_named(run, tmp_path):
    process = start("t1jax.audit", f"--run={tmp_path}")
    _, err = process.communicate()
    assert process.returncode == 1 and "config.json cannot be read" in err
    copy = copied(run, tmp_path)
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").unlink()
    for left in ([], lines[:1] + lines[2:]):
        (copy / "metrics.jsonl").write_text("".join(left))
        first = 1 if left else 0
        with pytest.raises(Offence, match=f"step {first} was trained on, but its metrics are not"):
            audit_run(copy)
    (copy / "metrics.jsonl").write_text("".join(lines))
    for name in ("advantages", "trajectories"):
        store.step_path(copy / name, 1).unlink()
        with pytest.raises(Offence, match=f"step 1 was trained on, but its {name} are not there"):
            audit_run(copy)
    for name in ("advantages", "trajectories", "checkpoints"):
        shutil.rmtree(copy / name)
    (copy / "metrics.jsonl").unlink()
    process = start("t1jax.audit", f"--run={copy}")
    _, err = process.communicate()
    assert process.returncode == 1
    assert err.strip().endswith("no step is stored, so there is nothing to check")


@pytest.mark.slow
def test_a_chunk_without_the_one_before_it_is_named(stitched):
    check = functools.partial(check_step, stitched.experiment, stitched.chat, stitched.pool, 0)
    stored = store.read_step(stitched.run / "trajectories", 0)
    again = dataclasses.replace(stored[3], chunk=2)
    with pytest.raises(ValueError, match=f"trial {again.trial}, chunk 2: the chunk before"):
        check([*stored[:4], again, *stored[4:]])
    other = dataclasses.replace(stored[3], chunk=1, reward=-1.0)
    with pytest.raises(ValueError, match="another outcome than the chunk before it"):
        check([*stored[:4], other, *stored[4:]])
