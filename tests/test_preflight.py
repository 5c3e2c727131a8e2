"""Preflight: generated tasks are fit, and each way of being unfit is named."""

import asyncio
import json
import subprocess
import sys

import pytest

from t1jax.agent.generate import generate
from t1jax.agent.task import load_tasks
from t1jax.preflight import check_tasks, table
from t1jax.sandbox.namespace import NamespaceSandbox, SandboxUnavailable, check_available

PASS = 'echo \'{"results": {"tests": [{"name": "a", "status": "passed"}]}}\' > /logs/verifier/ctrf.json\n'
VERDICT = "[[ -e done ]]; echo $((! $?)) > /logs/verifier/reward.txt\n"
MORE = '[[ -e done ]] && sed -i \'s/\\[/[{"name": "b", "status": "passed"},/\' /logs/verifier/ctrf.json\n'


@pytest.fixture(autouse=True)
def available():
    try:
        check_available()
    except SandboxUnavailable as error:
        pytest.fail(str(error))


def write_task(path, test_sh, solve_sh="touch done\n", dockerfile="FROM scratch\nWORKDIR /app\n"):
    for name in ("environment", "tests", "solution"):
        (path / name).mkdir(parents=True)
    (path / "task.toml").write_text('[solution.env]\nNAME = "two words"\n')
    (path / "instruction.md").write_text("Do it.")
    (path / "environment/Dockerfile").write_text(dockerfile)
    (path / "tests/test.sh").write_text(test_sh)
    if solve_sh:
        (path / "solution/solve.sh").write_text(solve_sh)


def check(folder):
    return asyncio.run(check_tasks(load_tasks(folder), NamespaceSandbox.start))


def test_generated_tasks_are_fit(tmp_path):
    generate(tmp_path / "t", "eval", 8, 0)
    for fitness in check(tmp_path / "t"):
        assert fitness.problem == "", fitness
        assert 0 <= fitness.noop < fitness.assertions and fitness.seconds > 0


def test_the_solution_gets_its_environment(tmp_path):
    write_task(tmp_path / "a", PASS + VERDICT, '[ "$NAME" = "two words" ] && touch done\n')
    assert [f.problem for f in check(tmp_path)] == [""]


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"solve_sh": "false\n"}, "the oracle fails without a report"),
        ({"solve_sh": None}, "no solution/solve.sh"),
        ({"test_sh": "echo 1 > /logs/verifier/reward.txt"}, "doing nothing resolves it"),
        ({"test_sh": "true"}, "verifier of a no-op: no_outcome"),
        ({"test_sh": PASS + VERDICT + MORE}, "2 assertions for the oracle, 1 for a no-op"),
        ({"dockerfile": "FROM scratch\nRUN exit 3\n"}, "sandbox: RUN"),
        ({"dockerfile": "FROM scratch\nEXPOSE 80\n"}, "EXPOSE is not supported"),
    ],
)
def test_what_is_unfit_is_named(tmp_path, changes, problem):
    write_task(tmp_path / "a", **{"test_sh": VERDICT, **changes})
    (fitness,) = found = check(tmp_path)
    assert problem in fitness.problem
    assert problem in table(found)


def preflight(*arguments):
    command = [sys.executable, "-m", "t1jax.preflight", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_command(tmp_path):
    write_task(tmp_path / "t/good", PASS + VERDICT)
    ended = preflight(f"--tasks={tmp_path}/t", f"--out={tmp_path}/found.json")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "1 of 1 tasks are fit"
    (record,) = json.loads((tmp_path / "found.json").read_text())
    assert (record["task"], record["assertions"], record["noop"]) == ("good", 1, 1)

    write_task(tmp_path / "t/unfit", VERDICT, "false\n")
    ended = preflight(f"--tasks={tmp_path}/t")
    assert ended.returncode == 1
    assert ended.stdout.splitlines()[-1] == "1 of 2 tasks are fit"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tasks=none"], "none: no such folder of tasks"),
        (["--tasks=none", "--sandbox=docker"], "--sandbox=docker is not supported yet"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    ended = preflight(*arguments)
    assert ended.returncode == 1 and message in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
