"""What became of a trial: ends, attempts, verdicts and tasks that cannot be are named."""

import dataclasses

import numpy as np
import pytest
from test_batch import trajectory
from test_batch import turn as ids

from configs import tiny
from t1jax.experiment import read_experiment
from t1jax.outcome import check_trial, endings
from t1jax.run import shuffle_pool
from t1jax.types import Assertion, ExecResult, Verdict

EXPERIMENT = read_experiment(tiny.get_config())  # bash, 6 turns, 3 attempts, dense rewards
BASH = EXPERIMENT.episode
TERMINUS = dataclasses.replace(BASH, protocol="terminus")
DONE = ExecResult(0, "", 0.0, False)
PASSED = Verdict((Assertion("a", True),), True, "report", "", 0.0)
SILENT = Verdict((), None, "no_outcome", "", 0.0)


def turn(action, finish="stop", result=DONE, command="true"):
    """A turn of one sampled token."""
    if action in ("malformed", "none") or (action == "submit" and command == "true"):
        command = result = None
    return dataclasses.replace(
        ids([1], [2], [-1]), action=action, finish=finish, result=result, command=command
    )


RUN, SUBMIT, WRONG = turn("command"), turn("submit"), turn("malformed")
CUT, LOST = turn("none", "length"), turn("none", "abort")
SUMMARY = turn("summary", command=None)


@pytest.mark.parametrize(
    ("config", "turns", "expected"),
    [
        (BASH, [], {"context_full", "timeout", "infra"}),
        (BASH, [RUN], {"context_full", "timeout", "infra"}),
        (BASH, [RUN, WRONG] * 3, {"out_of_turns", "timeout", "infra"}),
        (BASH, [RUN, SUBMIT], {"submitted"}),
        (BASH, [RUN] * 5 + [SUBMIT], {"submitted"}),
        (BASH, [RUN, CUT], {"length"}),
        (BASH, [RUN, LOST], {"infra"}),
        (BASH, [turn("none", "no such finish")], set()),
        (TERMINUS, [], {"context_full", "timeout", "infra", "closed"}),
        (TERMINUS, [SUBMIT], {"context_full", "timeout", "infra", "closed"}),
        (TERMINUS, [SUBMIT, RUN, SUBMIT], {"context_full", "timeout", "infra", "closed"}),
        (TERMINUS, [SUBMIT, WRONG], {"context_full", "timeout", "infra"}),
        (TERMINUS, [SUBMIT, SUBMIT], {"submitted", "timeout", "infra", "closed"}),
        (TERMINUS, [SUBMIT, SUMMARY, SUBMIT], {"context_full", "timeout", "infra", "closed"}),
        (BASH, [RUN, SUMMARY], {"context_full", "timeout", "infra"}),
        (BASH, [RUN, turn("summary", "length")], {"context_full", "timeout", "infra"}),
        (BASH, [RUN, turn("summary", "abort")], {"infra"}),
    ],
)
def test_how_a_trial_can_end(config, turns, expected):
    assert endings(turns, config) == expected


def trial(*turns, **changes):
    """A trial that was submitted and passed one test."""
    t = trajectory(*(turns or (RUN, SUBMIT)), reward=1 / 20)
    return dataclasses.replace(t, **{"verdict": PASSED} | changes)


def check(*chunks, pool=None, **episode):
    config = dataclasses.replace(BASH, **episode)
    check_trial(dataclasses.replace(EXPERIMENT, episode=config, chat_template="a"), pool, chunks)


@pytest.mark.parametrize(
    "t",
    [
        trial(),
        trial(attempt=2),
        trial(RUN, CUT, status="length"),
        trial(RUN, turn("command", result=None), status="timeout"),  # while it ran
        trial(
            RUN, turn("command", result=None), status="infra", verdict=None, reward=None, attempt=2
        ),
        trial(verdict=SILENT, reward=None, attempt=2),
        dataclasses.replace(trial(), turns=(), experts=np.zeros((0, 0, 0)), status="context_full"),
    ],
)
def test_what_can_be_passes(t):
    check(t)


@pytest.mark.parametrize(
    ("t", "message"),
    [
        (trial(status="timeout"), "status 'timeout' cannot follow its 2 turns"),
        (trial(status="cancelled"), "status 'cancelled' cannot follow"),
        (trial(status="well"), "status 'well' cannot follow"),
        (trial(RUN), "status 'submitted' cannot follow its 1 turns"),
        (trial(RUN, CUT), "status 'submitted' cannot follow"),
        (trial(status="infra"), "status 'infra' cannot follow"),
        (trial(*[RUN] * 7, status="out_of_turns"), "turn 6 comes after its end"),
        (trial(SUBMIT, SUBMIT), "turn 1 comes after its end"),
        (trial(CUT, SUBMIT), "turn 1 comes after its end"),
        (trial(turn("command", result=None), SUBMIT), "turn 0 has one of command and result"),
        (trial(turn("command", command=None), SUBMIT), "turn 0 has one of command and result"),
        (trial(RUN, dataclasses.replace(SUBMIT, result=DONE)), "turn 1 has one of command and"),
        (trial(attempt=-1), "attempt -1 of 3"),
        (trial(attempt=3), "attempt 3 of 3"),
        (trial(verdict=SILENT, reward=None, attempt=1), "attempt 1 of 3 came to reward None"),
        (trial(verdict=None), "status 'submitted' without a verdict"),
        (trial(RUN, status="infra"), "status 'infra' with a verdict"),
        (trial(verdict=dataclasses.replace(PASSED, outcome=None)), "no verdict has outcome None"),
        (trial(verdict=dataclasses.replace(PASSED, cause="hm")), "no verdict has .* cause 'hm'"),
        (trial(verdict=dataclasses.replace(PASSED, assertions=())), "'report', 0 tests"),
        (trial(reward=1.0), "reward 1.0, the verdict gives 0.05"),
        (trial(reward=None, attempt=2), "reward None, the verdict gives 0.05"),
        (trial(reward=float("nan")), "reward nan, the verdict gives 0.05"),
        (trial(chunk=1), "chunk 1: the chunk before it is not there"),
    ],
)
def test_what_cannot_be_is_named(t, message):
    with pytest.raises(ValueError, match=f"trial 0.* {message}"):
        check(t)


@pytest.mark.parametrize(
    "change", [{"task": "x"}, {"family": "x"}, {"attempt": 1}, {"cause": "x"}, {"reward": 0.0}]
)
def test_chunks_share_what_is_the_trials(change):
    first, second = trial(RUN), trial(SUBMIT, chunk=1)
    check(first, second, history="stitched")
    with pytest.raises(ValueError, match="trial 0, chunk 1: another outcome than the chunk before"):
        check(first, dataclasses.replace(second, **change), history="stitched")
    with pytest.raises(ValueError, match="chunk 0: it is not the last, though its history only"):
        check(first, second)


def test_summaries_end_their_chunks():
    compacts = {"max_context": 192, "compact_below": 99, "max_summary": 9}
    first, second = trial(RUN, SUMMARY), trial(SUBMIT, chunk=1)
    check(first, second, **compacts)
    check(trial(RUN, SUMMARY, status="timeout"), **compacts)
    with pytest.raises(ValueError, match="chunk 0: turn 1 is a summary, where none can be"):
        check(first, second)
    with pytest.raises(ValueError, match="chunk 0: turn 1 is a summary, where none can be"):
        check(trial(RUN, SUMMARY, SUBMIT), **compacts)
    with pytest.raises(ValueError, match="turn 1 has one of command and result without"):
        check(trial(RUN, dataclasses.replace(SUMMARY, result=None)), second, **compacts)


def test_a_terminal_is_read_whatever_is_typed():
    looked, done = turn("command", command=None), dataclasses.replace(SUBMIT, result=DONE)
    check(trial(looked, WRONG, done, done), protocol="terminus")
    check(
        trial(looked, dataclasses.replace(looked, result=None), status="closed"),
        protocol="terminus",
    )
    with pytest.raises(ValueError, match="turn 0 has one of command and result without"):
        check(trial(SUBMIT, done), protocol="terminus")


def test_tasks_are_those_of_the_pool():
    @dataclasses.dataclass
    class Named:
        name: str
        family: str = "f"

    pool = shuffle_pool([Named(f"t{i}\udcff") for i in range(5)], seed=3)
    named = [trial(trial=i, task=pool[i].name.replace("\udcff", "?")) for i in range(12)]
    for t in named:
        check(t, pool=pool)
    for change in ({"task": named[1].task}, {"family": "g"}):
        wrong = dataclasses.replace(named[0], **change)
        with pytest.raises(ValueError, match=r"trial 0: task and family .* gives \['t\d\?', 'f'\]"):
            check(wrong, pool=pool)
