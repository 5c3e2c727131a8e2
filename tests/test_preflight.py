"""Preflight: generated tasks are fit, and each way of being unfit is named."""

import asyncio
import subprocess
import sys

import pytest

from configs import tiny
from t1jax.agent.decontaminate import index
from t1jax.agent.fitness import read_lines
from t1jax.agent.generate import generate
from t1jax.agent.task import TaskError, load_tasks
from t1jax.experiment import read_experiment
from t1jax.preflight import CONTAMINATED, check_tasks, table
from t1jax.run import load_pool
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


def check(folder, known=()):
    tasks = load_tasks(folder)
    return asyncio.run(check_tasks(tasks, NamespaceSandbox.start, "namespace", 4, dict(known)))


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


def test_the_command_goes_on_from_its_file(tmp_path):
    write_task(tmp_path / "t/good", PASS + VERDICT)
    write_task(tmp_path / "t/unfit", VERDICT, "false\n")
    arguments = (f"--tasks={tmp_path}/t", f"--out={tmp_path}/found.jsonl")
    ended = preflight(*arguments)
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.splitlines()[-1] == "1 of 2 tasks are fit"
    first = {f.task: f for f in read_lines((tmp_path / "found.jsonl").read_text(), tmp_path)}
    good = first["good"]
    assert (good.assertions, good.noop, good.sandbox, good.problem) == (1, 1, "namespace", "")
    assert good.size == sum(p.stat().st_size for p in tmp_path.rglob("t/good/**/*") if p.is_file())

    # A kill cut the last line; one task was mended since; another is new.
    with open(tmp_path / "found.jsonl", "a") as file:
        file.write('{"task": "go')
    (tmp_path / "t/unfit/solution/solve.sh").write_text("touch done\n")
    write_task(tmp_path / "t/new", VERDICT)
    ended = preflight(*arguments)
    assert ended.returncode == 0, ended.stdout
    second = {f.task: f for f in read_lines((tmp_path / "found.jsonl").read_text(), tmp_path)}
    assert second["good"] == good and set(second) == {"good", "unfit", "new"}
    assert not any(f.problem for f in second.values())


def test_a_task_that_shares_words_with_the_evaluation_set_is_unfit(tmp_path):
    words = [f"word{i}" for i in range(30)]
    for name, said in (("same", words[10:23]), ("near", words[10:22])):
        write_task(tmp_path / "t" / name, VERDICT)
        (tmp_path / "t" / name / "instruction.md").write_text("Now: " + ", ".join(said).upper())
    write_task(tmp_path / "eval/one", VERDICT)
    (tmp_path / "eval/one/instruction.md").write_text(" ".join(words))
    near, same = check(tmp_path / "t", index(load_tasks(tmp_path / "eval")))
    assert near.problem == ""
    assert same.problem == f"{CONTAMINATED} one: {' '.join(words[10:23])}"
    assert check(tmp_path / "eval", index(load_tasks(tmp_path / "t")))[0].problem.startswith(
        f"{CONTAMINATED} same: word10"
    )


def test_a_short_instruction_is_shared_as_a_whole(tmp_path):
    write_task(tmp_path / "t/a", VERDICT)
    assert check(tmp_path / "t", {("do", "it"): "b"})[0].problem == f"{CONTAMINATED} b: do it"


def test_a_run_leaves_out_what_is_unfit(tmp_path, capsys):
    write_task(tmp_path / "t/good", PASS + VERDICT)
    write_task(tmp_path / "t/unfit", VERDICT, "false\n")
    preflight(f"--tasks={tmp_path}/t", f"--out={tmp_path}/found.jsonl")
    config = tiny.get_config()
    config.tasks.train, config.tasks.preflight = f"{tmp_path}/t", f"{tmp_path}/found.jsonl"
    experiment = read_experiment(config)
    assert [task.name for task in load_pool(experiment, "train", tmp_path)] == ["good"]
    assert capsys.readouterr().err == "left out 1 of 2 tasks as unfit\n"

    (tmp_path / "t/good/instruction.md").write_text("Do something else.")
    with pytest.raises(TaskError, match="good is not as it was when it was checked; run"):
        load_pool(experiment, "train", tmp_path)
    write_task(tmp_path / "t/also", VERDICT)
    with pytest.raises(TaskError, match="t/also was not checked; run"):
        load_pool(experiment, "train", tmp_path)
    (tmp_path / "found.jsonl").write_text("{}\n")
    with pytest.raises(TaskError, match="line 1: no record of a preflight"):
        load_pool(experiment, "train", tmp_path)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tasks=none"], "none: no such folder of tasks"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    ended = preflight(*arguments)
    assert ended.returncode == 1 and message in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
