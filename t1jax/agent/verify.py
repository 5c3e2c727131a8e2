"""The Harbor verifier: what the sandbox holds after an episode, judged by the task's own tests.

The agent's processes are ended first; /tests and /logs/verifier are made anew; then `bash /tests/test.sh`
runs with an environment of our own and its exit code is ignored where it left results. The first line
that holds decides:

| found                                                           | cause            | outcome     |
|-----------------------------------------------------------------|------------------|-------------|
| the sandbox failed                                              | infra            | none        |
| the system that tests rely on was tampered with (see tamper.py) | tampered         | False       |
| more files than the task allows, where that stops their copy    | tampered         | False       |
| time was up                                                     | verifier_timeout | none        |
| a file of the tests was changed while they ran                  | tampered         | False       |
| no report, and killed by a signal (exit code 129..192)          | verifier_crash   | none        |
| a reward file that is not a number in [0, 1]                    | bad_reward       | none        |
| no reward file                                                  | no_outcome       | none        |
| reward below 1, no report, its test runner could not be found   | infra            | none        |
| a report of at least one test                                   | report           | reward == 1 |
| no report                                                       | no_report        | reward == 1 |
| a report without tests (a collection error)                     | no_tests         | reward == 1 |
| a report that cannot be read                                    | bad_report       | reward == 1 |

The report is ctrf.json where there is one, even a broken one; else junit.xml. The reward is reward.json where
there is one (a number, or a dict of finite numbers: its "reward", else the least of them), even a broken one;
else reward.txt (one number).

Tests that talk to a server which the agent left running (`live_processes = true` under [verifier]) run in a
sandbox of their own that has the agent's files and shares its network, so no process of the agent's can reach
what they write.
"""

import contextlib
import re
from collections.abc import AsyncIterator
from typing import Literal

from t1jax.agent.report import read_report, read_reward
from t1jax.agent.tamper import contents, find_tampering, remove_picked_up
from t1jax.sandbox.protocol import Sandbox, SandboxError, Tampered
from t1jax.types import ExecResult, Task, Verdict

LOGS = "/logs/verifier"
MAX_REPORT = 4 << 20  # bytes; a TermiGen report of 20 tests has about 10 kB
MAX_REWARD = 64 << 10
OUTCOMES = ("report", "no_report", "no_tests", "bad_report", "tampered")  # the causes with one
ENV = {
    # the image's own tools come before those that an agent could have put into other folders
    "PATH": "/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/bin:/usr/local/sbin",
    "HOME": "/root",
    "LC_ALL": "C.UTF-8",
    "TERM": "dumb",
    # No modules of the work folder, of the home folder, or compiled ones that others left.
    "PYTHONSAFEPATH": "1",
    "PYTHONNOUSERSITE": "1",
    "PYTHONPYCACHEPREFIX": f"{LOGS}/pycache",
}
# Else pytest reads a pytest.ini or conftest.py of the folders above, which the agent could write to.
PYTEST = {"PYTEST_ADDOPTS": "-c /dev/null --rootdir=/tests --confcutdir=/tests"}
PYTEST_CONFIGS = ("pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")
RUNNER_MISSING = re.compile(
    r"^\S+: line \d+: (?:\S*/)?(?:uvx?|pytest|python3?|pip3?|npx|node): "
    r"(?:command not found|No such file or directory)$",
    re.MULTILINE,
)


async def verify(task: Task, sandbox: Sandbox, fresh: bool = False) -> Verdict:
    """Ends the agent, runs the task's tests and reads their verdict by the table above. Never raises.

    `fresh`: always in a fork, which no process of the agent's has ever been in.
    """
    own = any((task.tests / name).exists() for name in PYTEST_CONFIGS)
    env = ENV | ({} if own else PYTEST) | {**task.env, **task.verifier_env}
    try:
        async with _without_agent(task, sandbox, fresh) as place:
            await remove_picked_up(await place.changed(), place)
            for folder in ("/tests", LOGS):
                await place.reset_folder(folder)
            await place.put("/tests", task.tests)
            command = ["bash", "/tests/test.sh"]
            result = await place.execute(command, task.verifier_timeout_s, env, task.workdir)
            left = [
                await place.get(f"{LOGS}/{name}", limit)
                for name, limit in (
                    ("ctrf.json", MAX_REPORT),
                    ("junit.xml", MAX_REPORT),
                    ("reward.json", MAX_REWARD),
                    ("reward.txt", MAX_REWARD),
                )
            ]
            if not result.timed_out:
                for name, data in contents(task.tests):
                    if await place.get(f"/tests/{name}", len(data)) != data:
                        says = f"/tests/{name} was changed while the tests ran"
                        return Verdict((), False, "tampered", says, result.seconds)
    except Tampered as error:
        return Verdict((), False, "tampered", str(error), 0.0)
    except SandboxError as error:
        return Verdict((), None, "infra", str(error), 0.0)
    return judge(result, *left)


@contextlib.asynccontextmanager
async def _without_agent(task: Task, sandbox: Sandbox, fresh: bool) -> AsyncIterator[Sandbox]:
    """Where the tests run: a place that no process of the agent's can write to. Raises Tampered."""
    if not task.live_processes:
        await sandbox.end_agent()
    if not (task.live_processes or fresh):
        if found := await find_tampering(await sandbox.changed(), sandbox):
            raise Tampered(found)
        yield sandbox
        return
    place = await sandbox.fork(find_tampering)
    try:
        yield place
    finally:
        await place.close()


def judge(
    result: ExecResult,
    ctrf: bytes | None,
    junit: bytes | None,
    reward_json: bytes | None,
    reward_txt: bytes | None,
) -> Verdict:
    """The table above as a pure function of what the verifier left."""
    assertions, cause = read_report(ctrf, junit)
    outcome = None
    if result.timed_out:
        cause = "verifier_timeout"
    elif not assertions and 128 < result.exit_code <= 192:
        cause = "verifier_crash"
    else:
        try:
            value = read_reward(reward_json, reward_txt)
        except ValueError:
            cause = "bad_reward"
        else:
            if value is None:
                cause = "no_outcome"
            elif value < 1 and cause == "no_report" and RUNNER_MISSING.search(result.output):
                cause = "infra"
            else:
                outcome = value == 1
    kept = assertions if outcome is not None else ()
    return Verdict(kept, outcome, cause, result.output, result.seconds)


def reward(
    verdict: Verdict, kind: Literal["dense", "binary", "ratio"] = "dense", scale: float = 20.0
) -> float | None:
    """The reward of a trial; None where the verifier gave no outcome (the trial is refilled).

    With P of T assertions passing and b the outcome: dense P/scale (T1's, may exceed 1), binary b,
    ratio max(b, 0.4 P/T). Without a per-assertion report each is b.
    """
    if kind not in ("dense", "binary", "ratio"):
        raise ValueError(f"reward kind {kind!r} is not dense, binary or ratio")
    if verdict.outcome is None:
        return None
    if kind == "binary" or verdict.cause != "report":
        return float(verdict.outcome)
    if kind == "dense":
        return verdict.passing / scale
    return max(float(verdict.outcome), 0.4 * verdict.passing / len(verdict.assertions))
