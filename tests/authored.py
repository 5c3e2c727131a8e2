"""Authored Harbor tasks of many kinds, tests/tasks/NAME: folders as they are, to be read and to be copied."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from pathlib import Path

from docker_fixtures import docker_config

from t1jax.agent.task import load_tasks
from t1jax.preflight import MakeSandbox
from t1jax.sandbox.docker import DockerSandbox
from t1jax.sandbox.docker_hosts import DockerHosts

TASKS = {task.name: task for task in load_tasks(Path(__file__).parent / "tasks")}


def judged(trial: Callable[[MakeSandbox], Awaitable]):
    """The result of a trial that makes its Docker sandboxes with what it is given."""

    async def main():
        hosts = DockerHosts(docker_config())
        try:
            return await trial(functools.partial(DockerSandbox.start, hosts))
        finally:
            hosts.close()

    return asyncio.run(main())
