"""Checks tasks before they cost anything: the oracle resolves each, doing nothing does not.

    python -m t1jax.preflight --tasks=DIR [--out=FILE.jsonl] [--against=EVALUATION_DIR] [--sandbox=docker]

Also recorded: how many assertions a no-op passes (P_noop), that their number is the same in both runs, seconds and
bytes; and refused is a task that shares 13 words in a row with one of the evaluation set. Prints a table; FILE gets
one JSON object a task as soon as it is known, and the same command goes on with what is not there yet. A run with
`tasks.preflight=FILE` leaves out what is unfit. The exit code is 1 when any task is unfit. Containers are those of
the daemon that $DOCKER_HOST names.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from absl import flags

from t1jax import command
from t1jax.agent.decontaminate import find_contamination, index
from t1jax.agent.fitness import Fitness, digest, read_lines
from t1jax.agent.task import load_tasks
from t1jax.agent.verify import verify
from t1jax.files import write_bytes
from t1jax.sandbox.docker_hosts import DockerConfig
from t1jax.sandbox.namespace import MAX_OUTPUT
from t1jax.sandbox.pool import MakeSandbox, SandboxConfig, open_sandboxes
from t1jax.sandbox.protocol import SandboxError
from t1jax.types import Task, Verdict

CONTAMINATED = "shares words with the evaluation task"
Known = Mapping[tuple[str, ...], str]  # see decontaminate.index


async def check_tasks(
    tasks: Sequence[Task],
    make_sandbox: MakeSandbox,
    sandbox: str,
    parallel: int,
    known: Known,
    note: Callable[[Fitness], None] = lambda fitness: None,
) -> list[Fitness]:
    """Runs the oracle and a no-op of every task, `parallel` at a time; results in the order of `tasks`.

    `note` is told of each as soon as it is known.
    """
    places = asyncio.Semaphore(parallel)

    async def check(task: Task) -> Fitness:
        async with places:
            fitness = await check_task(task, make_sandbox, sandbox, known)
        note(fitness)
        return fitness

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(check(task)) for task in tasks]
    return [each.result() for each in running]


async def check_task(task: Task, make_sandbox: MakeSandbox, sandbox: str, known: Known) -> Fitness:
    """The oracle's run and a no-op's, each in a sandbox of its own."""
    started, fresh = time.monotonic(), sandbox == "docker"
    oracle = noop = None
    if found := find_contamination(task, known):
        problem = f"{CONTAMINATED} {found}"
    else:
        try:
            noop = await attempt(task, make_sandbox, fresh, oracle=False)
            if task.solution:
                oracle = await attempt(task, make_sandbox, fresh, oracle=True)
            problem = find_problem(oracle, noop)
        except SandboxError as error:
            problem = f"sandbox: {error}"
    sha, size = digest(task)
    return Fitness(
        task=task.name,
        family=task.family,
        digest=sha,
        sandbox=sandbox,
        assertions=len(oracle.assertions) if oracle and oracle.cause == "report" else None,
        noop=noop.passing if noop and noop.cause == "report" else None,
        seconds=round(time.monotonic() - started, 3),
        size=size,
        problem=problem,
    )


async def attempt(task: Task, make_sandbox: MakeSandbox, fresh: bool, oracle: bool) -> Verdict:
    """Runs solution/solve.sh in the agent's shell, or nothing, and verifies. Raises SandboxError."""
    sandbox = await make_sandbox(task, MAX_OUTPUT)
    try:
        if oracle:
            await sandbox.put("/solution", task.solution)
            variables = [f"{name}={value}" for name, value in task.solution_env.items()]
            argv = ["env", *variables, "bash", "/solution/solve.sh"]
            await sandbox.run(shlex.join(argv), task.agent_timeout_s)
        return await verify(task, sandbox, fresh)
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
    if oracle.outcome is None or oracle.cause == "tampered":
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


def known_already(path: Path, tasks: Sequence[Task], sandbox: str) -> dict[str, Fitness]:
    """Records of an earlier call that still hold, by task; the file keeps these alone.

    A last line that a kill cut short is dropped. Raises TaskError for a file that is something else.
    """
    if not path.exists():
        return {}
    text = path.read_text("utf-8", "replace")
    whole = text[: text.rfind("\n") + 1]
    digests = {task.name: digest(task)[0] for task in tasks}
    kept = {
        f.task: f
        for f in read_lines(whole, path)
        if digests.get(f.task) == f.digest and f.sandbox == sandbox
    }
    write_bytes(path, "".join(map(_line, kept.values())).encode())
    return kept


def _holds(record: Fitness | None, task: Task, known: Known) -> bool:
    """Whether a task need not be checked again; the evaluation set may be another one now."""
    shares = find_contamination(task, known) is not None
    return record is not None and record.problem.startswith(CONTAMINATED) == shares


def _line(fitness: Fitness) -> str:
    return json.dumps(dataclasses.asdict(fitness), sort_keys=True) + "\n"


def main() -> None:
    tasks = load_tasks(Path(TASKS.value))
    known = index(load_tasks(Path(AGAINST.value))) if AGAINST.value else {}
    config = SandboxConfig(SANDBOX.value, DockerConfig())
    with open_sandboxes(config) as make_sandbox, contextlib.ExitStack() as files:
        earlier, note = {}, lambda fitness: None
        if OUT.value:
            out = Path(OUT.value)
            earlier = known_already(out, tasks, SANDBOX.value)
            out.parent.mkdir(parents=True, exist_ok=True)
            file = files.enter_context(open(out, "a", buffering=1))
            note = lambda fitness: file.write(_line(fitness))  # noqa: E731
        rest = [t for t in tasks if not _holds(earlier.get(t.name), t, known)]
        found = asyncio.run(
            check_tasks(rest, make_sandbox, SANDBOX.value, PARALLEL.value, known, note)
        )
    found = {**earlier, **{f.task: f for f in found}}
    found = [found[task.name] for task in tasks]
    print(table(found))
    unfit = sum(bool(f.problem) for f in found)
    print(f"{len(found) - unfit} of {len(found)} tasks are fit")
    sys.exit(1 if unfit else 0)


if __name__ == "__main__":
    TASKS = flags.DEFINE_string("tasks", None, "Folder of Harbor tasks.", required=True)
    AGAINST = flags.DEFINE_string("against", None, "Folder of the evaluation set's tasks.")
    SANDBOX = flags.DEFINE_enum("sandbox", "namespace", ["namespace", "docker"], "Where they run.")
    OUT = flags.DEFINE_string("out", None, "Write what was found to this file, and go on from it.")
    PARALLEL = flags.DEFINE_integer(
        "parallel", 4 * (os.cpu_count() or 1), "Sandboxes at a time.", 1
    )
    command.run(main)
