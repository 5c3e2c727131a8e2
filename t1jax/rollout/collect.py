"""Concurrent trials: start a sandbox, run the episode, verify, reward; refill what infrastructure broke."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from t1jax.agent.action import Protocol
from t1jax.agent.chat import Chat
from t1jax.agent.episode import EpisodeLimits, run_episode
from t1jax.agent.verify import reward, verify
from t1jax.types import Sampler, Sandbox, SandboxError, Task, Trajectory

MakeSandbox = Callable[[Task, int], Awaitable[Sandbox]]  # the int: bytes kept of a command's output


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

    protocol: Protocol
    limits: EpisodeLimits
    temperature: float
    reward_kind: str
    reward_scale: float
    concurrency: int  # sandboxes at a time
    max_attempts: int  # of one trial
    max_infra_share: float  # of trials given up; above it the step is given up, too


async def collect(
    trials: Sequence[Trial],
    make_sandbox: MakeSandbox,
    sampler: Sampler,
    chat: Chat,
    config: CollectConfig,
    progress: Callable[[Trajectory], None] = lambda trajectory: None,
) -> list[Trajectory]:
    """Runs all trials; returns their trajectories in the order of `trials`, each with a reward
    but for those given up.

    A trial that had no room or no time for a single reply has a verdict and a reward, but no tokens to
    train on. An attempt without a reward is made again, with the same randomness; after `max_attempts`
    the trial is given up: its trajectory has reward None. Raises CollectError when more than
    `max_infra_share` of the trials are given up. The first exception of any kind ends the rest.
    """
    places = asyncio.Semaphore(config.concurrency)
    given_up: list[int] = []

    async def finish(trial: Trial) -> Trajectory:
        for attempt in range(config.max_attempts):
            async with places:
                trajectory = await run_trial(trial, attempt, make_sandbox, sampler, chat, config)
            if trajectory.reward is not None:
                break
        else:
            given_up.append(trial.number)
            if len(given_up) > config.max_infra_share * len(trials):
                raise CollectError(
                    f"{len(given_up)} of {len(trials)} trials got no outcome in {config.max_attempts} "
                    f"attempts, last trial {trial.number} ({trial.task.name}): {trajectory.cause}"
                )
        progress(trajectory)
        return trajectory

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(finish(trial)) for trial in trials]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def run_trial(
    trial: Trial,
    attempt: int,
    make_sandbox: MakeSandbox,
    sampler: Sampler,
    chat: Chat,
    config: CollectConfig,
) -> Trajectory:
    """One attempt at one task, verified also where a limit ended it; reward None where there is no outcome."""
    arguments = (trial.number, attempt, config.temperature)
    try:
        sandbox = await make_sandbox(trial.task, config.limits.max_output_bytes)
    except SandboxError as error:
        return _without_start(trial.task, *arguments, str(error))
    try:
        trajectory = await run_episode(
            trial.task, sandbox, sampler, chat, config.limits, config.protocol, *arguments
        )
        if trajectory.status == "infra":
            return trajectory
        verdict = await verify(trial.task, sandbox)
    finally:
        with contextlib.suppress(
            SandboxError
        ):  # it is dead to us; its fork server ends it at the latest
            await sandbox.close()
    value = reward(verdict, config.reward_kind, config.reward_scale)
    cause = trajectory.cause if value is not None else f"verifier: {verdict.cause}"
    return dataclasses.replace(trajectory, verdict=verdict, reward=value, cause=cause)


def _without_start(task: Task, number: int, attempt: int, temperature: float, cause: str):
    nothing = np.zeros((0, 0, 0), np.uint8)
    return Trajectory(
        task.name, task.family, number, attempt, 0, (), nothing, "infra", cause, temperature
    )
