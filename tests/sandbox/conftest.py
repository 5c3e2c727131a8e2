"""A fixture that runs an async body against a fresh namespace sandbox."""

import asyncio

import pytest

from t1jax.sandbox.namespace import NamespaceSandbox, SandboxUnavailable, check_available
from t1jax.types import Task


def make_task(environment, **fields) -> Task:
    """A task around an environment folder; `fields` replace the defaults."""
    values = {
        "name": "probe",
        "path": environment,
        "instruction": "",
        "environment": environment,
        "tests": environment,
        "solution": None,
        "workdir": None,
        "agent_timeout_s": 60.0,
        "verifier_timeout_s": 60.0,
        "live_processes": False,
        "build_timeout_s": 60.0,
        "docker_image": None,
        "cpus": 1.0,
        "memory_mb": 1024,
        "storage_mb": 64,
        "network": "no-network",
        "env": {},
        "verifier_env": {},
        "solution_env": {},
        "metadata": {},
        "unknown_keys": (),
    }
    return Task(**{**values, **fields})


@pytest.fixture(scope="session")
def available():
    try:
        check_available()
    except SandboxUnavailable as error:
        pytest.fail(str(error))


@pytest.fixture
def inside(available, tmp_path):
    """inside(body, dockerfile, **task fields): awaits body(sandbox) in a new sandbox, gives its result."""

    def go(body, dockerfile="FROM scratch\n", max_output=10_000, **fields):
        environment = tmp_path / "environment"
        environment.mkdir(exist_ok=True)
        (environment / "Dockerfile").write_text(dockerfile)

        async def main():
            sandbox = await NamespaceSandbox.start(make_task(environment, **fields), max_output)
            try:
                return await body(sandbox)
            finally:
                await sandbox.close()

        return asyncio.run(main())

    return go
