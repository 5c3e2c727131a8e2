"""Concurrent trials: start a sandbox, run the episode, verify, reward; refill what infrastructure broke."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from t1jax.agent.chat import Chat
from t1jax.agent.episode import EpisodeConfig, run_episode
from t1jax.agent.verify import reward, verify
from t1jax.sandbox.pool import MakeSandbox
from t1jax.sandbox.protocol import Sandbox, SandboxError
from t1jax.types import Sampler, SamplerError, Task, Trajectory

CLOSE_S = 30.0  # what closing a sandbox has at least, whatever is left of the trial's time


class CollectError(RuntimeError):
    """Too many trials failed in the infrastructure to train on the rest: one line with the first cause."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One attempt at a task. `number` is unique in the run and keys the sampling randomness."""

    task: Task
    number: int


@dataclasses.dataclass(frozen=True)
class CollectConfig:
    """How trials are run; `reward_kind` and `reward_scale` as in agent/verify.py."""

    episode: EpisodeConfig
    temperature: float
    reward_kind: str
    reward_scale: float
    concurrency: int  # sandboxes at a time
    max_attempts: int  # of one trial
    max_infra_share: float  # of trials given up; above it the step is given up, too
    fresh_verifier: bool = False  # see agent/verify.py


async def collect(
    trials: Sequence[Trial],
    make_sandbox: MakeSandbox,
    sampler: Sampler,
    chat: Chat,
    config: CollectConfig,
    progress: Callable[[list[Trajectory]], None] = lambda chunks: None,
) -> list[Trajectory]:
    """Runs all trials; returns their trajectories in the order of `trials` and chunks, each with a reward
    but for those given up. `progress` is told of every trial that has come to its end.

    A trial that had no room or no time for a single reply has a verdict and a reward, but no tokens to
    train on. An attempt without a reward is made again, with the same randomness; after `max_attempts`
    the trial is given up: its trajectory has reward None. Raises CollectError when more than
    `max_infra_share` of the trials are given up. The first exception of any kind ends the rest.
    """
    places = asyncio.Semaphore(config.concurrency)
    given_up: list[int] = []

    async def finish(trial: Trial) -> list[Trajectory]:
        for attempt in range(config.max_attempts):
            async with places:
                chunks = await run_trial(trial, attempt, make_sandbox, sampler, chat, config)
            if chunks[0].reward is not None:
                break
        else:
            given_up.append(trial.number)
            if len(given_up) > config.max_infra_share * len(trials):
                raise CollectError(
                    f"{len(given_up)} of {len(trials)} trials got no outcome in {config.max_attempts} "
                    f"attempts, last trial {trial.number} ({trial.task.name}): {chunks[0].cause}"
                )
        progress(chunks)
        return chunks

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(finish(trial)) for trial in trials]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [chunk for task in tasks for chunk in task.result()]


async def run_trial(
    trial: Trial,
    attempt: int,
    make_sandbox: MakeSandbox,
    sampler: Sampler,
    chat: Chat,
    config: CollectConfig,
) -> list[Trajectory]:
    """One attempt at one task, verified also where a limit ended it; reward None where there is no outcome.

    Verdict and reward are those of the trial: every chunk has them, undivided. The trial's time begins once it
    is admitted. An image that is yet to be built, and the verifier, have times of their own, by task.
    """
    task, arguments = trial.task, (trial.number, attempt, config.temperature)
    clock, seconds = asyncio.get_running_loop().time, config.episode.trial_timeout_s
    try:
        await sampler.admit()
        until = clock() + seconds + task.build_timeout_s
        sandbox = await _start(make_sandbox, task, config.episode, until)
    except (SamplerError, SandboxError) as error:
        return [_without_start(task, *arguments, str(error))]
    until = min(until, clock() + seconds)
    try:
        episode = sampler, chat, config.episode, *arguments
        chunks = await run_episode(task, sandbox, *episode, until=until)
        if chunks[0].status == "infra":
            return chunks
        verifying = clock()
        verdict = await verify(task, sandbox, config.fresh_verifier)
        until += clock() - verifying
    finally:
        # Where that fails it is dead to us; its host ends it at the latest.
        with contextlib.suppress(SandboxError, TimeoutError):
            async with asyncio.timeout_at(max(until, clock() + CLOSE_S)):
                await sandbox.close()
    value = reward(verdict, config.reward_kind, config.reward_scale)
    cause = chunks[0].cause if value is not None else f"verifier: {verdict.cause}"
    return [dataclasses.replace(c, verdict=verdict, reward=value, cause=cause) for c in chunks]


async def _start(
    make_sandbox: MakeSandbox, task: Task, config: EpisodeConfig, until: float
) -> Sandbox:
    """Raises SandboxError also where it is not there by then."""
    try:
        async with asyncio.timeout_at(until) as deadline:
            return await make_sandbox(task, config.max_output_bytes)
    except TimeoutError:
        if not deadline.expired():
            raise
        raise SandboxError(
            f"no sandbox within {config.trial_timeout_s:g} s and {task.build_timeout_s:g} s for its image"
        ) from None


def _without_start(task: Task, number: int, attempt: int, temperature: float, cause: str):
    nothing = np.zeros((0, 0, 0), np.uint8)
    return Trajectory(
        task.name, task.family, number, attempt, 0, (), nothing, "infra", cause, temperature
    )
