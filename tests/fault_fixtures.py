"""What the tests of faults share: trials on a fleet while something breaks, and the processes of an engine."""

import asyncio
import dataclasses
import itertools
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from fakes import COLLECT, EPISODE, TOKENIZER
from fleet_fixtures import FLEET, QWEN3

from t1jax.agent.chat import Chat
from t1jax.rollout.collect import Trial, collect
from t1jax.sandbox.namespace import NamespaceSandbox
from t1jax.types import SamplerError

MODEL = dataclasses.replace(QWEN3, vocab_size=512)
CONFIG = dataclasses.replace(
    COLLECT,
    # Without stop ids each reply is as long as it may be: seconds, and the only one.
    episode=dataclasses.replace(
        EPISODE, max_turns=2, max_context=640, max_reply=256, agent_timeout_s=60.0
    ),
    concurrency=8,
    max_infra_share=0.0,
)
NUMBERS = itertools.count(100)
ONE = dataclasses.replace(FLEET, engines=1)
STREAM = np.arange(4, 20, dtype=np.int32)


def publish(fleet, params) -> None:
    publish.version += 1
    fleet.load(params, publish.version)
    assert fleet.version == publish.version and all(m.check() for m in fleet._members)


publish.version = 0


def refuses_to_serve(fleet) -> bool:
    with pytest.raises(SamplerError, match="the fleet has no weights"):
        asyncio.run(fleet.sample(next(NUMBERS), 0, STREAM, 0, 4))
    return fleet.version == -1


def settles(fleet, member) -> bool:
    """Whether a load would trust the engine as it is."""
    return asyncio.run_coroutine_threadsafe(member.settles(10.0), fleet._loop).result()


def run(fleet, tasks, fault=lambda: None, **changes):
    """All `tasks` at once, `fault()` while replies are under way: (chunks, trial numbers, what fault gave)."""
    trials = [Trial(task, next(NUMBERS)) for task in tasks]
    sandboxes, ended, ready = [], [], asyncio.Barrier(len(trials) + 1)

    async def start(task, max_output):
        sandboxes.append(sandbox := await NamespaceSandbox.start(task, max_output))
        if len(sandboxes) <= len(trials):  # however long one takes, they all ask together
            await ready.wait()
        return sandbox

    async def main():
        config = dataclasses.replace(CONFIG, **changes)
        work = collect(trials, start, fleet, Chat(TOKENIZER), config, ended.append)
        async with asyncio.TaskGroup() as group:
            done = group.create_task(work)
            await ready.wait()
            await asyncio.sleep(0.5)
            found = fault()
        return done.result(), found

    try:
        chunks, found = asyncio.run(main())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    finally:
        assert not any(map(running, [s.pid for s in sandboxes])), "a sandbox outlived its trial"
    numbers = [trial.number for trial in trials]
    assert [c.trial for c in chunks] == numbers
    assert sorted(c.trial for each in ended for c in each) == numbers
    assert not fleet._home and not fleet._requests
    return chunks, numbers, found


def running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def group_of(member) -> list[int]:
    """Processes of the engine that run, whoever their parent is now."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(group) == member.server.process.pid and state != "Z":
            found.append(int(path.parent.name))
    return found


def until(condition, seconds: float) -> float:
    """Seconds that it took to come true."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() < started + seconds, "it did not come true in time"
        time.sleep(0.05)
    return time.monotonic() - started


def kill(member, sign=signal.SIGKILL) -> set[int]:
    """Signals the whole engine; returns the trials that it served."""
    lost = set(member.trials)
    os.killpg(member.server.process.pid, sign)
    return lost
