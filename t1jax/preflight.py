"""Checks tasks before they cost anything: the oracle resolves each, doing nothing does not.

    python -m t1jax.preflight --tasks=DIR [--out=FILE.json]

Also recorded: how many assertions a no-op passes (P_noop), that their number is the same in both runs, and
the seconds. Prints a table; the exit code is 1 when any task is unfit.
"""

import asyncio
import dataclasses
import os
import shlex
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from absl import flags

from t1jax import command
from t1jax.agent.task import TaskError, load_tasks
from t1jax.agent.verify import verify
from t1jax.files import write_json
from t1jax.sandbox.namespace import NamespaceSandbox, check_available
from t1jax.types import Sandbox, SandboxError, Task, Verdict

CONCURRENCY = 4 * (os.cpu_count() or 1)  # sandboxes at a time

MakeSandbox = Callable[[Task], Awaitable[Sandbox]]


@dataclasses.dataclass(frozen=True)
class Fitness:
    """What was found out about one task. `problem` is "" where it is fit.

    `assertions`: in the oracle's report; `noop`: how many of them pass when nothing is done; both None
    without a report. `seconds`: both runs together, sandboxes included.
    """

    task: str
    family: str
    assertions: int | None
    noop: int | None
    seconds: float
    problem: str


async def check_tasks(tasks: Sequence[Task], make_sandbox: MakeSandbox) -> list[Fitness]:
    """Runs the oracle and a no-op of every task, CONCURRENCY at a time; results in the order of `tasks`."""
    places = asyncio.Semaphore(CONCURRENCY)

    async def check(task: Task) -> Fitness:
        async with places:
            fitness = await check_task(task, make_sandbox)
        return fitness

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(check(task)) for task in tasks]
    return [each.result() for each in running]


async def check_task(task: Task, make_sandbox: MakeSandbox) -> Fitness:
    """The oracle's run and a no-op's, each in a sandbox of its own."""
    started = time.monotonic()
    try:
        noop = await attempt(task, make_sandbox, oracle=False)
        oracle = await attempt(task, make_sandbox, oracle=True) if task.solution else None
    except SandboxError as error:
        return Fitness(
            task.name, task.family, None, None, time.monotonic() - started, f"sandbox: {error}"
        )
    reported = noop.cause == "report"
    return Fitness(
        task=task.name,
        family=task.family,
        assertions=len(oracle.assertions) if oracle and oracle.cause == "report" else None,
        noop=noop.passing if reported else None,
        seconds=time.monotonic() - started,
        problem=find_problem(oracle, noop),
    )


async def attempt(task: Task, make_sandbox: MakeSandbox, oracle: bool) -> Verdict:
    """Runs solution/solve.sh in the agent's shell, or nothing, and verifies. Raises SandboxError."""
    sandbox = await make_sandbox(task)
    try:
        if oracle:
            await sandbox.put("/solution", task.solution)
            variables = [f"{name}={value}" for name, value in task.solution_env.items()]
            argv = ["env", *variables, "bash", "/solution/solve.sh"]
            await sandbox.run(shlex.join(argv), task.agent_timeout_s)
        return await verify(task, sandbox)
    finally:
        await sandbox.close()


def find_problem(oracle: Verdict | None, noop: Verdict) -> str:
    """Why a task is unfit, or "". `oracle` None: the task has no solution."""
    if noop.outcome is None:
        return f"verifier of a no-op: {noop.cause}"
    if noop.outcome:
        return "doing nothing resolves it"
    if oracle is None:
        return "no solution/solve.sh: nothing shows that it can be solved"
    if oracle.outcome is None:
        return f"verifier of the oracle: {oracle.cause}"
    if not oracle.outcome:
        failed = [a.name for a in oracle.assertions if not a.passed]
        return f"the oracle fails {', '.join(failed) or 'without a report'}"
    if oracle.cause == noop.cause == "report" and len(oracle.assertions) != len(noop.assertions):
        return f"{len(oracle.assertions)} assertions for the oracle, {len(noop.assertions)} for a no-op"
    return ""


def table(found: Sequence[Fitness]) -> str:
    """One line a task: assertions, how many a no-op passes, seconds, and what is wrong."""
    width = max(len(f.task) for f in found)
    lines = [f"{'task':{width}}  assertions  P_noop  seconds"]
    for f in found:
        counts = f"{_or_dash(f.assertions):>10}  {_or_dash(f.noop):>6}  {f.seconds:7.2f}"
        lines.append(f"{f.task:{width}}  {counts}  {f.problem or 'fit'}")
    return "\n".join(lines)


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def main() -> None:
    if SANDBOX.value == "docker":
        raise TaskError("--sandbox=docker is not supported yet: use --sandbox=namespace")
    tasks = load_tasks(Path(TASKS.value))
    check_available()
    found = asyncio.run(check_tasks(tasks, NamespaceSandbox.start))
    print(table(found))
    if OUT.value:
        records = [dataclasses.asdict(f) for f in found]
        write_json(Path(OUT.value), records)
    unfit = sum(bool(f.problem) for f in found)
    print(f"{len(found) - unfit} of {len(found)} tasks are fit")
    sys.exit(1 if unfit else 0)


if __name__ == "__main__":
    TASKS = flags.DEFINE_string("tasks", None, "Folder of Harbor tasks.", required=True)
    SANDBOX = flags.DEFINE_enum("sandbox", "namespace", ["namespace", "docker"], "Where they run.")
    OUT = flags.DEFINE_string("out", None, "Write what was found to this JSON file, too.")
    command.run(main)
