"""Tasks for sandboxes without a task folder, and commands run in them."""

from t1jax.types import Task


def commands(inside, *lines, timeout_s=20.0, **fields):
    """The results of commands run one after another in one shell."""

    async def body(sandbox):
        return [await sandbox.run(line, timeout_s) for line in lines]

    return inside(body, **fields)


def outputs(inside, *lines, **fields):
    return [(r.exit_code, r.output) for r in commands(inside, *lines, **fields)]


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


async def nothing(changed, files) -> None:
    """A check of a fork's files that finds nothing."""
