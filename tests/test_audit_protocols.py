"""Trials of every protocol and of several chunks pass the audit's checks as they come back from a file."""

import asyncio
import dataclasses

import numpy as np
import pytest
from fakes import (
    COLLECT,
    TOKENIZER,
    ScriptedSampler,
    bash,
    generated,
    need_sandbox,
    replies,
    terminus,
)

from configs import tiny
from t1jax.agent.chat import Chat
from t1jax.audit import check_words
from t1jax.experiment import read_experiment
from t1jax.outcome import check_trial
from t1jax.rollout import store
from t1jax.rollout.collect import Trial, collect
from t1jax.sandbox.namespace import NamespaceSandbox

EPISODE = dataclasses.replace(
    COLLECT.episode,
    max_turns=12,
    max_context=4000,
    max_reply=300,
    compact_below=900,
    max_summary=150,
    turn_timeout_s=15.0,
    max_output_bytes=4000,
)
TINY = tiny.get_config()
TINY.train.buckets, TINY.sft.row_length = (4000,), 4000
EXPERIMENT = dataclasses.replace(read_experiment(TINY), episode=EPISODE)
SEQ, LOOK, DONE = terminus("seq 99\n", "pwd\n", wait=0.2), terminus(), terminus(done=True)


@pytest.fixture(scope="module")
def chat():
    return Chat(TOKENIZER)


@pytest.fixture(scope="module")
def solved(tmp_path_factory):
    need_sandbox()
    return generated(tmp_path_factory.mktemp("tasks"), 1)[0]


def run(chat, solved, tmp_path, script, **changes):
    """The chunks of a trial as they come back from a file, and the experiment it belongs to."""
    config = dataclasses.replace(EPISODE, **changes)
    experiment = dataclasses.replace(EXPERIMENT, episode=config)
    trials, sampler = [Trial(solved[0], 0)], ScriptedSampler(chat, {0: script})
    settings = dataclasses.replace(COLLECT, episode=config)
    done = asyncio.run(collect(trials, NamespaceSandbox.start, sampler, chat, settings))
    store.write_step(tmp_path, 0, done)
    return store.read_step(tmp_path, 0), experiment


def check(chunks, experiment, chat):
    check_trial(experiment, None, chunks)
    for chunk in chunks:
        chunk.check()
        check_words(experiment, chat, chunk, "")


@pytest.mark.parametrize(
    ("protocol", "script", "status"),
    [
        ("bash", [bash("seq 900")] * 3 + ["What I did.", "hm", bash("exit 3")], "submitted"),
        ("bash", [bash("seq 900")] * 3 + ["maple " * 200, bash("true")], "submitted"),
        ("terminus", [LOOK, "hm", f"So: {SEQ}", *[SEQ] * 20], "out_of_turns"),
        ("terminus", [SEQ, DONE, LOOK, DONE, "hm", DONE, DONE], "submitted"),
        ("terminus", [LOOK, terminus("exit\n", wait=0.3)], "closed"),
    ],
)
def test_it_passes(chat, solved, tmp_path, protocol, script, status):
    if protocol == "bash":
        script = [*script, *replies(solved[1])]
    chunks, experiment = run(chat, solved, tmp_path, script, protocol=protocol)
    assert chunks[0].status == status and chunks[0].verdict is not None
    if status != "closed" and script[1] != DONE:
        assert len(chunks) > 1 and chunks[0].turns[-1].action == "summary"
    check(chunks, experiment, chat)


def test_what_was_not_said_is_named(chat, solved, tmp_path):
    script = [SEQ] * 12
    chunks, experiment = run(chat, solved, tmp_path, script, protocol="terminus")

    def changed(turn, **changes):
        turns = list(chunks[0].turns)
        turns[turn] = dataclasses.replace(turns[turn], **changes)
        return [dataclasses.replace(chunks[0], turns=tuple(turns)), *chunks[1:]]

    other = np.append(chunks[0].turns[-1].context[:-1], np.int32(7))
    with pytest.raises(ValueError, match=r"the context of turn .* is not what turn"):
        check(changed(-1, context=other), experiment, chat)
    with pytest.raises(ValueError, match="turn 0 is command 'C-c', its ids say command 'seq 99"):
        check(changed(0, command="C-c"), experiment, chat)
    told = dataclasses.replace(chunks[0].turns[0].result, output="Current Terminal Screen:\n100")
    with pytest.raises(ValueError, match="the context of turn 1 is not what turn 0 came to"):
        check(changed(0, result=told), experiment, chat)
    with pytest.raises(ValueError, match="turn 0 is a summary, where none can be"):
        check(changed(0, action="summary"), experiment, chat)
