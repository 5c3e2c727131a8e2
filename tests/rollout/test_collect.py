"""Concurrent trials in real sandboxes: order, refills, endings, and no leftovers."""

import asyncio
import dataclasses
import os
import signal

import numpy as np
import pytest
from fakes import (
    COLLECT,
    SUBMIT,
    TOKENIZER,
    ScriptedSampler,
    bash,
    generated,
    need_sandbox,
    replies,
)

from t1jax.agent.chat import Chat
from t1jax.agent.task import load_task
from t1jax.rollout.collect import CollectError, Trial, collect
from t1jax.sandbox.namespace import NamespaceSandbox
from t1jax.sandbox.protocol import SandboxError
from t1jax.types import SamplerError


@pytest.fixture(scope="module")
def chat():
    return Chat(TOKENIZER)


@pytest.fixture(scope="module")
def solved(tmp_path_factory):
    """(task, solution) of each family."""
    need_sandbox()
    return generated(tmp_path_factory.mktemp("tasks"))


class Sandboxes:
    """Starts real sandboxes and remembers them."""

    def __init__(self):
        self.started: list[NamespaceSandbox] = []
        self.of: dict[str, NamespaceSandbox] = {}  # the last one of each task
        self.most = 0

    async def __call__(self, task, max_output):
        sandbox = await NamespaceSandbox.start(task, max_output)
        self.started.append(sandbox)
        self.of[task.name] = sandbox
        self.most = max(self.most, sum(map(alive, self.started)))
        return sandbox


def alive(sandbox: NamespaceSandbox) -> bool:
    try:
        os.kill(sandbox.pid, 0)
    except ProcessLookupError:
        return False
    return True


def gather(tasks, sampler, chat, make=None, **changes):
    make = make or Sandboxes()
    config = dataclasses.replace(COLLECT, **changes)
    trials = [Trial(task, 100 + i) for i, task in enumerate(tasks)]
    try:
        return asyncio.run(collect(trials, make, sampler, chat, config))
    finally:
        if isinstance(make, Sandboxes):
            assert not any(map(alive, make.started)), "a sandbox outlived its trial"


def scripts(solved) -> dict[int, list[str]]:
    return {100 + i: replies(solution) for i, (_, solution) in enumerate(solved)}


def test_all_families_in_order_with_their_rewards(chat, solved):
    sampler, make = ScriptedSampler(chat, scripts(solved)), Sandboxes()
    trials = [Trial(task, 100 + i) for i, (task, _) in enumerate(solved)]
    seen = []
    done = asyncio.run(collect(trials, make, sampler, chat, COLLECT, seen.append))
    assert [t.trial for t in done] == [t.number for t in trials]
    assert sorted(chunks[0].trial for chunks in seen) == [t.number for t in trials]
    for trajectory in done:
        trajectory.check()
        assert trajectory.status == "submitted" and trajectory.resolved
        assert trajectory.reward == len(trajectory.verdict.assertions) / 20 > 0
    assert make.most <= COLLECT.concurrency
    assert not any(map(alive, make.started))
    assert sorted(sampler.released) == [t.trial for t in done]


def test_the_same_trials_give_the_same_records(chat, solved):
    """Whatever finishes first: everything but the clock is equal, at any concurrency."""
    tasks = [task for task, _ in solved]
    runs = [
        gather(tasks, ScriptedSampler(chat, scripts(solved)), chat, concurrency=n) for n in (1, 8)
    ]
    for a, b in zip(*runs, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.experts, b.experts)
        assert (a.status, a.reward, a.verdict.assertions) == (
            b.status,
            b.reward,
            b.verdict.assertions,
        )
        assert [t.result and t.result.output for t in a.turns] == [
            t.result and t.result.output for t in b.turns
        ]


def test_only_the_failed_trial_is_made_again(chat, solved):
    """Traps 117, 143: one sandbox dies at step 2, one sampler call fails; the others run once."""
    make, script = Sandboxes(), scripts(solved)
    tasks = [task for task, _ in solved]
    first, second = script[102][0], script[100][1]
    due = {"engine", "sandbox"}

    async def engine_fails():
        if "engine" in due:
            due.remove("engine")
            return SamplerError("engine gone")
        return first

    async def sandbox_dies():
        if "sandbox" in due:
            due.remove("sandbox")
            os.kill(make.of[tasks[0].name].pid, signal.SIGKILL)
        return second

    script[102][0], script[100][1] = engine_fails, sandbox_dies
    sampler = ScriptedSampler(chat, script)
    done = gather(tasks, sampler, chat, make, max_infra_share=0.5)
    assert [t.attempt for t in done] == [1 if t.trial in (100, 102) else 0 for t in done]
    assert all(t.resolved for t in done)
    asked = {trial: len(calls) for trial, calls in sampler.asked().items()}
    assert asked[102] == len(script[102]) + 1  # one call failed, no more were made
    assert asked[100] == len(script[100]) + 2
    assert all(asked[t.trial] == len(t.turns) for t in done if not t.attempt)


def test_a_trial_that_always_fails_is_given_up_and_the_others_stay(chat, solved):
    tasks = [task for task, _ in solved[:4]]
    script = scripts(solved) | {101: [SamplerError("engine gone")]}
    done = gather(tasks, ScriptedSampler(chat, script), chat, max_infra_share=0.25)
    assert [t.reward is None for t in done] == [False, True, False, False]
    assert done[1].attempt == COLLECT.max_attempts - 1 and "engine gone" in done[1].cause
    with pytest.raises(CollectError, match=r"1 of 4 trials .* in 3 attempts, .* 101 .*engine gone"):
        gather(tasks, ScriptedSampler(chat, script), chat, max_infra_share=0.1)


def test_waiting_for_admission_is_not_the_agents_time(chat, solved):
    class Slow(ScriptedSampler):
        async def admit(self):
            await asyncio.sleep(1.5)

    task, solution = solved[0]
    limits = dataclasses.replace(COLLECT.episode, agent_timeout_s=1.0)
    sampler = Slow(chat, {100: replies(solution)})
    (trajectory,) = gather([task], sampler, chat, episode=limits)
    assert trajectory.status == "submitted" and trajectory.resolved


def test_a_trial_that_is_not_admitted_has_no_sandbox(chat, solved):
    class Gone(ScriptedSampler):
        async def admit(self):
            raise SamplerError("the fleet is closed")

    sandboxes = Sandboxes()
    (t,) = gather([solved[0][0]], Gone(chat, {}), chat, sandboxes, max_infra_share=1.0)
    assert (t.status, t.cause, sandboxes.started) == ("infra", "the fleet is closed", [])


def test_too_many_failures_stop_the_step(chat, solved):
    """Trap 62: a broken machine is no batch of zeros; the message is one line."""

    async def no_sandbox(task, max_output):
        raise SandboxError("no space left")

    tasks = [task for task, _ in solved]
    with pytest.raises(
        CollectError, match=r"\d of 8 trials got no outcome in 3 attempts, .*no space left"
    ) as caught:
        gather(tasks, ScriptedSampler(chat, {}), chat, no_sandbox)
    assert "\n" not in str(caught.value)


def test_a_bug_ends_everything_and_leaves_nothing(chat, solved):
    async def bug():
        await asyncio.sleep(0.2)
        return KeyError("bug")

    tasks = [task for task, _ in solved]
    script = {n: [bash("sleep 5"), SUBMIT] for n in range(100, 108)} | {101: [bug]}
    sampler = ScriptedSampler(chat, script)
    with pytest.raises(KeyError, match="bug"):
        gather(tasks, sampler, chat)
    assert set(sampler.released) == set(sampler.asked())


def test_cancellation_leaves_nothing(chat, solved):
    make = Sandboxes()
    sampler = ScriptedSampler(chat, {n: [bash("sleep 30")] for n in range(100, 108)})
    trials = [Trial(task, 100 + i) for i, (task, _) in enumerate(solved)]

    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await collect(trials, make, sampler, chat, COLLECT)

    asyncio.run(main())
    assert make.started and not any(map(alive, make.started))
    assert set(sampler.released) == set(sampler.asked())


@pytest.mark.parametrize(
    ("script", "limits", "status"),
    [
        (["echo x > y", "sleep 30"], {"agent_timeout_s": 1.0}, "timeout"),
        (["true"] * 3, {"max_turns": 2}, "out_of_turns"),
        (["true"], {"max_context": 5}, "context_full"),
        (["true"], {"max_reply": 3}, "length"),
    ],
)
def test_a_limit_is_verified_like_an_end(chat, solved, script, limits, status):
    """Traps 16, 110: the verdict comes from what the sandbox holds, and the trial is not refilled."""
    task = solved[3][0]
    changed = dataclasses.replace(COLLECT.episode, **limits)
    sampler = ScriptedSampler(chat, {100: [bash(c) for c in script]})
    (trajectory,) = gather([task], sampler, chat, episode=changed)
    assert trajectory.status == status and trajectory.attempt == 0
    assert not trajectory.ended and not trajectory.resolved
    assert trajectory.verdict.outcome is False and trajectory.verdict.cause == "report"
    assert trajectory.reward == trajectory.verdict.passing / 20


def test_work_done_before_a_limit_counts(chat, solved):
    """Trap 110: the whole solution, but no time to say so."""
    task, solution = solved[0]
    script = [*map(bash, solution), bash("sleep 30")]
    limits = dataclasses.replace(COLLECT.episode, agent_timeout_s=1.5)
    (trajectory,) = gather([task], ScriptedSampler(chat, {100: script}), chat, episode=limits)
    assert trajectory.status == "timeout" and trajectory.resolved and not trajectory.ended


def test_a_trial_has_a_time_of_its_own(chat, solved):
    """A slow start takes the agent's time away; what it did is verified, and the trial is not refilled."""
    task, solution = solved[0]
    sandboxes = Sandboxes()

    async def slow(task, max_output):
        await asyncio.sleep(0.7)
        return await sandboxes(task, max_output)

    script = [*map(bash, solution), bash("sleep 30")]
    limits = dataclasses.replace(COLLECT.episode, trial_timeout_s=1.5)
    quick = dataclasses.replace(task, build_timeout_s=1.0)
    sampler = ScriptedSampler(chat, {100: script})
    (trajectory,) = gather([quick], sampler, chat, slow, episode=limits)
    assert (trajectory.status, trajectory.cause) == ("timeout", "the trial's 1.5 s were over")
    assert trajectory.resolved and trajectory.attempt == 0
    assert not any(map(alive, sandboxes.started))


def test_a_sandbox_that_does_not_start_is_an_infrastructure_failure(chat, solved):
    """There is nothing to verify: the trial is made again, then given up."""

    async def never(task, max_output):
        await asyncio.sleep(60)

    task = dataclasses.replace(solved[0][0], build_timeout_s=0.1)
    limits = dataclasses.replace(COLLECT.episode, trial_timeout_s=0.2)
    sampler = ScriptedSampler(chat, {})
    (t,) = gather([task], sampler, chat, never, episode=limits, max_infra_share=1.0)
    assert (t.status, t.attempt, t.reward) == ("infra", COLLECT.max_attempts - 1, None)
    assert t.cause == "no sandbox within 0.2 s and 0.1 s for its image" and sampler.calls == []


def test_a_sandbox_that_does_not_close_keeps_no_trial(chat, solved, monkeypatch):
    """Its verdict stands."""
    monkeypatch.setattr("t1jax.rollout.collect.CLOSE_S", 0.2)
    task, solution = solved[0]
    ends = []

    async def stuck(task, max_output):
        sandbox = await NamespaceSandbox.start(task, max_output)
        close = sandbox.close

        async def hang():
            try:
                await asyncio.sleep(60)
            finally:
                ends.append(sandbox)
                await close()

        sandbox.close = hang
        return sandbox

    limits = dataclasses.replace(COLLECT.episode, trial_timeout_s=1.5)
    sampler = ScriptedSampler(chat, {100: replies(solution)})
    (trajectory,) = gather([task], sampler, chat, stuck, episode=limits)
    assert trajectory.status == "submitted" and trajectory.resolved and len(ends) == 1


def test_the_chunks_of_a_trial_share_its_verdict(chat, solved):
    """A summary in between changes nothing about what the work is worth."""
    task, solution = solved[0]
    limits = dataclasses.replace(
        COLLECT.episode, max_context=1200, max_reply=100, compact_below=600, max_summary=100
    )
    script = [bash("seq 100"), bash("seq 100"), "Counted.", *replies(solution)]
    chunks = gather([task], ScriptedSampler(chat, {100: script}), chat, episode=limits)
    assert [c.chunk for c in chunks] == [0, 1]
    assert [t.action for t in chunks[0].turns] == ["command", "command", "summary"]
    first, second = chunks
    assert (first.reward, first.verdict) == (second.reward, second.verdict)
    assert first.resolved and first.status == second.status == "submitted"
    for chunk in chunks:
        chunk.check()
        assert len(chunk.experts) == len(chunk.tokens) - 1


@pytest.fixture
def graded(tmp_path):
    """graded(test.sh) -> a task with that verifier."""

    def make(test):
        path = tmp_path / "task"
        for folder in ("environment", "tests"):
            (path / folder).mkdir(parents=True)
        (path / "task.toml").write_text('version = "1.0"\n[agent]\ntimeout_sec = 20.0\n')
        (path / "instruction.md").write_text("Nothing .\n")
        (path / "environment/Dockerfile").write_text("FROM scratch\n")
        (path / "tests/test.sh").write_text(test)
        return load_task(path)

    return make


@pytest.mark.parametrize(
    ("test", "cause"),
    [
        ("uvx pytest\necho 0 > /logs/verifier/reward.txt\n", "infra"),  # trap 108
        ("true\n", "no_outcome"),
        ("echo nan > /logs/verifier/reward.txt\n", "bad_reward"),
        ("kill -SEGV $$\n", "verifier_crash"),
    ],
)
def test_no_outcome_is_never_a_zero(chat, graded, test, cause):
    need_sandbox()
    sampler = ScriptedSampler(chat, {100: [SUBMIT]})
    with pytest.raises(CollectError, match=f"1 of 1 trials .* in 3 attempts, .* verifier: {cause}"):
        gather([graded(test)], sampler, chat)
    assert len(sampler.calls) == 3


def test_a_collection_error_is_tagged(chat, graded):
    """Trap 109: no tests in the report; the binary outcome counts, and the cause says so."""
    need_sandbox()
    task = graded(
        'echo \'{"results": {"tests": []}}\' > /logs/verifier/ctrf.json\n'
        "echo 0 > /logs/verifier/reward.txt\n"
    )
    (trajectory,) = gather([task], ScriptedSampler(chat, {100: [SUBMIT]}), chat)
    assert (trajectory.verdict.cause, trajectory.reward) == ("no_tests", 0.0)
