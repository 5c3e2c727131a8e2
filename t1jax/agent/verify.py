"""The Harbor verifier: what the sandbox holds after an episode, judged by the task's own tests.

The agent's processes are ended first; /tests and /logs/verifier are made anew; then `bash /tests/test.sh`
runs with an environment of our own and its exit code is ignored where it left results. The first line
that holds decides:

| found                                                          | cause            | outcome     |
|----------------------------------------------------------------|------------------|-------------|
| the sandbox failed                                             | infra            | none        |
| time was up                                                    | verifier_timeout | none        |
| no report, and killed by a signal (exit code 129..192)         | verifier_crash   | none        |
| a reward file that is not a number in [0, 1]                   | bad_reward       | none        |
| no reward file                                                 | no_outcome       | none        |
| reward below 1, no report, its test runner could not be found  | infra            | none        |
| ctrf.json with at least one test                               | report           | reward == 1 |
| no ctrf.json                                                   | no_report        | reward == 1 |
| ctrf.json without tests (a collection error)                   | no_tests         | reward == 1 |
| ctrf.json that is no such report                               | bad_report       | reward == 1 |

The reward is reward.json where there is one (a number, or a dict of finite numbers: its "reward", else
the least of them), even a broken one; else reward.txt (one number).
"""

import json
import math
import re
from typing import Literal

from t1jax.types import Assertion, ExecResult, Sandbox, SandboxError, Task, Verdict

LOGS = "/logs/verifier"
MAX_REPORT = 4 << 20  # bytes of ctrf.json; a TermiGen report of 20 tests has about 10 kB
MAX_REWARD = 64 << 10
MAX_NAME = 1000  # characters of a test's name; what is beyond is cut off
OUTCOMES = ("report", "no_report", "no_tests", "bad_report")  # the causes that come with one
ENV = {
    # the image's own tools come before /usr/local, where an agent could have put others
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin",
    "HOME": "/root",
    "LC_ALL": "C.UTF-8",
    "TERM": "dumb",
}
RUNNER_MISSING = re.compile(
    r"^\S+: line \d+: (?:\S*/)?(?:uvx?|pytest|python3?|pip3?|npx|node): "
    r"(?:command not found|No such file or directory)$",
    re.MULTILINE,
)


async def verify(task: Task, sandbox: Sandbox) -> Verdict:
    """Ends the agent, runs the task's tests and reads their verdict by the table above. Never raises."""
    try:
        await sandbox.end_agent()
        for folder in ("/tests", LOGS):
            await sandbox.reset_folder(folder)
        await sandbox.put("/tests", task.tests)
        result = await sandbox.execute(
            ["bash", "/tests/test.sh"],
            task.verifier_timeout_s,
            ENV | {**task.env, **task.verifier_env},
            task.workdir,
        )
        report = await sandbox.get(f"{LOGS}/ctrf.json", MAX_REPORT)
        reward_json = await sandbox.get(f"{LOGS}/reward.json", MAX_REWARD)
        reward_txt = await sandbox.get(f"{LOGS}/reward.txt", MAX_REWARD)
    except SandboxError as error:
        return Verdict((), None, "infra", str(error), 0.0)
    return judge(result, report, reward_json, reward_txt)


def judge(
    result: ExecResult, report: bytes | None, reward_json: bytes | None, reward_txt: bytes | None
) -> Verdict:
    """The table above as a pure function of what the verifier left."""
    assertions, cause = read_report(report)
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
            elif value < 1 and report is None and RUNNER_MISSING.search(result.output):
                cause = "infra"
            else:
                outcome = value == 1
    kept = assertions if outcome is not None else ()
    return Verdict(kept, outcome, cause, result.output, result.seconds)


def read_report(data: bytes | None) -> tuple[tuple[Assertion, ...], str]:
    """The tests of a CTRF report, and "report" or why there are none."""
    if data is None:
        return (), "no_report"
    try:
        tests = json.loads(data)["results"]["tests"]
        assertions = tuple(Assertion(_name(t["name"]), t["status"] == "passed") for t in tests)
    except (ValueError, LookupError, TypeError, RecursionError):
        return (), "bad_report"
    return assertions, "report" if assertions else "no_tests"


def _name(value: object) -> str:
    """A test's name, of characters that can be written: JSON may escape half a surrogate pair."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no name")
    return value[:MAX_NAME].encode("utf-8", "replace").decode()


def read_reward(reward_json: bytes | None, reward_txt: bytes | None) -> float | None:
    """The verifier's own number in [0, 1]; None where it left none. ValueError for anything else."""
    if reward_json is not None:
        try:
            value = json.loads(reward_json)
        except RecursionError as error:
            raise ValueError("reward.json is nested too deeply") from error
        if not isinstance(value, dict):
            return _unit(_finite(value))
        numbers = {name: _finite(number) for name, number in value.items()}
        if not numbers:
            raise ValueError("reward.json is empty")
        return (
            _unit(numbers["reward"]) if "reward" in numbers else min(map(_unit, numbers.values()))
        )
    if reward_txt is not None:
        return _unit(_finite(float(reward_txt.decode("ascii"))))
    return None


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


def _finite(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number")
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError("an integer beyond every float") from error
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not finite")
    return number


def _unit(value: float) -> float:
    if not 0 <= value <= 1:
        raise ValueError(f"{value!r} is not in [0, 1]")
    return value
