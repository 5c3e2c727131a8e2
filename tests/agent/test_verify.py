"""The verifier: its table of causes, the rewards, and an agent that tries to grade itself."""

import asyncio
import json

import pytest

from t1jax.agent.report import MAX_NAME, read_report
from t1jax.agent.task import load_task
from t1jax.agent.verify import judge, reward, verify
from t1jax.sandbox.namespace import NamespaceSandbox, SandboxUnavailable, check_available
from t1jax.types import Assertion, ExecResult, Verdict

MISSING = "/tests/test.sh: line 20: uvx: command not found"


def report(*statuses) -> bytes:
    tests = [{"name": f"t{i}", "status": s, "duration": 1} for i, s in enumerate(statuses)]
    return json.dumps({"results": {"tool": {"name": "x"}, "summary": {}, "tests": tests}}).encode()


def ended(code=0, output="", timed_out=False) -> ExecResult:
    return ExecResult(code, output, 0.5, timed_out)


@pytest.mark.parametrize(
    "result, ctrf, reward_json, reward_txt, cause, outcome",
    [
        (ended(), report("passed"), None, b"1\n", "report", True),
        (ended(1), report("passed", "failed"), None, b"0", "report", False),
        (ended(), report("passed"), None, b"0.5", "report", False),
        (
            ended(139),
            report("passed"),
            None,
            b"1",
            "report",
            True,
        ),  # left its results: code ignored
        (ended(), None, None, b"1", "no_report", True),
        (ended(), report(), None, b"0", "no_tests", False),
        (ended(), b"{", None, b"0", "bad_report", False),
        (ended(), b'{"results": {"tests": {"a": 1}}}', None, b"0", "bad_report", False),
        (
            ended(),
            b'{"results": {"tests": [{"name": 1, "status": "passed"}]}}',
            None,
            b"0",
            "bad_report",
            False,
        ),
        (
            ended(),
            b'{"results": {"tests": [{"status": "passed"}]}}',
            None,
            b"1",
            "bad_report",
            True,
        ),
        (ended(), b"[" * 100_000, None, b"1", "bad_report", True),
        # reward.json beats reward.txt, also where it is broken
        (ended(), None, b"1", b"0", "no_report", True),
        (ended(), None, b'{"reward": 1, "seconds": 12.5}', b"0", "no_report", True),
        (ended(), None, b'{"a": 1, "b": 0.5}', b"1", "no_report", False),
        (ended(), None, b"{}", b"1", "bad_reward", None),
        (ended(), None, b"not json", b"1", "bad_reward", None),
        (ended(), None, b'{"reward": 1, "x": NaN}', b"1", "bad_reward", None),
        (ended(), None, b"true", b"1", "bad_reward", None),
        (ended(), None, b"1" + b"0" * 400, b"1", "bad_reward", None),
        *((ended(), None, None, text, "bad_reward", None) for text in (b"nan", b"inf", b"-1")),
        *(
            (ended(), None, None, text, "bad_reward", None)
            for text in (b"1.5", b"one", b"", b"\xff")
        ),
        (ended(1), report("passed"), None, None, "no_outcome", None),
        (ended(139), None, None, b"0", "verifier_crash", None),
        (ended(137), None, None, None, "verifier_crash", None),
        (ended(127, MISSING), None, None, b"0", "infra", None),
        (ended(127, MISSING), None, None, b"1", "no_report", True),
        (ended(127, MISSING), report("failed"), None, b"0", "report", False),
        (
            ended(1, "uvx: command not found"),
            None,
            None,
            b"0",
            "no_report",
            False,
        ),  # not the shell's
        (ended(124, timed_out=True), report("passed"), None, b"1", "verifier_timeout", None),
    ],
)
def test_table(result, ctrf, reward_json, reward_txt, cause, outcome):
    verdict = judge(result, ctrf, None, reward_json, reward_txt)
    assert (verdict.cause, verdict.outcome) == (cause, outcome)
    assert (len(verdict.assertions) > 0) == (cause == "report")
    assert (reward(verdict) is None) == (outcome is None)


def test_only_passed_tests_pass():
    assertions, cause = read_report(report("passed", "failed", "skipped", "pending", "other"), None)
    assert cause == "report" and [a.passed for a in assertions] == [True] + [False] * 4


JUNIT = b"""<?xml version="1.0"?><testsuites><testsuite name="pytest">
<testcase classname="a" name="good"/><testcase name="bad"><failure message="&lt;"/></testcase>
<testcase name="broken"><error/></testcase><testcase name="left out"><skipped/></testcase>
</testsuite></testsuites>"""


def test_junit_counts_where_there_is_no_ctrf():
    assertions, cause = read_report(None, JUNIT)
    assert cause == "report"
    names = [("a::good", True), ("bad", False), ("broken", False), ("left out", False)]
    assert [(a.name, a.passed) for a in assertions] == names
    assert read_report(report("passed"), JUNIT)[0] == (Assertion("t0", True),)
    assert read_report(b"{", JUNIT) == ((), "bad_report")


@pytest.mark.parametrize(
    ("junit", "cause"),
    [
        (b"<testsuites/>", "no_tests"),
        (b"<testcase/>", "bad_report"),
        (b"<testsuite>", "bad_report"),
        (b"", "bad_report"),
        (b'<!DOCTYPE x [<!ENTITY a "aaaa">]><testcase name="&a;"/>', "bad_report"),
    ],
)
def test_junit_that_is_no_report(junit, cause):
    assert read_report(None, junit) == ((), cause)


def test_names_are_short_and_can_be_written():
    tests = (
        b'[{"name": "caf\\u00e9 \\ud83d", "status": "passed"}, {"name": "%s", "status": "failed"}]'
    )
    (odd, long), _ = read_report(b'{"results": {"tests": %s}}' % (tests % (b"x" * 10**6)), None)
    assert odd == Assertion("café ?", True)
    assert long == Assertion("x" * MAX_NAME, False)


@pytest.mark.parametrize(
    "passing, total, outcome, dense, binary, ratio",
    [
        (4, 8, False, 4 / 20, 0.0, 0.2),
        (8, 8, True, 8 / 20, 1.0, 1.0),
        (0, 8, False, 0.0, 0.0, 0.0),
        (8, 8, False, 8 / 20, 0.0, 0.4),
        (30, 30, True, 1.5, 1.0, 1.0),  # not clipped
    ],
)
def test_rewards(passing, total, outcome, dense, binary, ratio):
    assertions = tuple(Assertion(str(i), i < passing) for i in range(total))
    verdict = Verdict(assertions, outcome, "report", "", 0.0)
    assert reward(verdict, "dense", 20.0) == pytest.approx(dense)
    assert reward(verdict, "binary") == binary
    assert reward(verdict, "ratio") == pytest.approx(ratio)


@pytest.mark.parametrize("kind", ["dense", "binary", "ratio"])
@pytest.mark.parametrize("outcome, value", [(True, 1.0), (False, 0.0), (None, None)])
def test_rewards_without_a_report(kind, outcome, value):
    assert reward(Verdict((), outcome, "no_report", "", 0.0), kind) == value


def test_unknown_kind_of_reward():
    with pytest.raises(ValueError, match="'sparse'"):
        reward(Verdict((), True, "no_report", "", 0.0), "sparse")


@pytest.fixture
def graded(tmp_path):
    """graded(test.sh, *commands of the agent): the verdict from a real sandbox."""
    try:
        check_available()
    except SandboxUnavailable as error:
        pytest.fail(str(error))

    def go(test_sh, *commands, toml=""):
        for name in ("environment", "tests"):
            (tmp_path / name).mkdir()
        (tmp_path / "environment/Dockerfile").write_text("FROM scratch\nWORKDIR /app\n")
        (tmp_path / "instruction.md").write_text("Do it.")
        (tmp_path / "task.toml").write_text(toml)
        (tmp_path / "tests/test.sh").write_text(test_sh)
        task = load_task(tmp_path)

        async def main():
            sandbox = await NamespaceSandbox.start(task)
            try:
                for command in commands:
                    await sandbox.run(command, 10.0)
                return await verify(task, sandbox)
            finally:
                await sandbox.close()

        return asyncio.run(main())

    return go


ABSENT = "[[ -e /app/done ]]; echo $((! $?)) > /logs/verifier/reward.txt\n"


def test_runs_in_the_work_folder_with_its_own_environment(graded):
    verdict = graded(
        'echo "$PWD $A $B $TERM"; echo 1 > /logs/verifier/reward.txt',
        "export A=9 TERM=evil; cd /tmp",
        toml='[environment]\nenv = {A = "1"}\n[verifier]\nenv = {B = "2"}\n',
    )
    assert verdict.outcome is True and verdict.output == "/app 1 2 dumb\n"


@pytest.mark.parametrize(
    "commands",
    [
        [
            "echo 1 > /logs/verifier/reward.txt",
            "echo '{\"reward\": 1}' > /logs/verifier/reward.json",
        ],
        ["rm -rf /logs/verifier; ln -s /tmp /logs/verifier; echo 1 > /tmp/reward.json"],
        ["rm -rf /logs/verifier; mkfifo /logs/verifier"],
        ["(setsid bash -c 'while :; do echo 1 > /logs/verifier/reward.json; done' &>/dev/null &)"],
        [
            "echo 'echo 1 > /logs/verifier/reward.txt; exit' > /tests/test.sh; chmod 444 /tests/test.sh"
        ],
        ["rm -rf /tests; ln -s /app /tests; echo 'exit' > test.sh"],
        ["mkdir -p /usr/local/bin; cp /bin/true /usr/local/bin/bash", "export BASH_ENV=/app/evil"],
        ["echo 'echo 1 > /logs/verifier/reward.json' > /root/.bashrc; cp /root/.bashrc ~/.profile"],
    ],
)
def test_an_agent_cannot_grade_itself(graded, commands):
    assert graded(ABSENT, *commands).outcome is False


def test_an_honest_agent_passes(graded):
    assert graded(ABSENT, "touch done").outcome is True


def test_timeout_is_named(graded):
    toml = "[verifier]\ntimeout_sec = 0.3\n"
    assert graded("sleep 20", toml=toml).cause == "verifier_timeout"


def test_crash_is_named(graded):
    assert graded("echo 0 > /logs/verifier/reward.txt; kill -SEGV $$").cause == "verifier_crash"


def test_a_dead_sandbox_is_infrastructure(graded, tmp_path):
    graded(ABSENT)
    task = load_task(tmp_path)

    async def main():
        sandbox = await NamespaceSandbox.start(task)
        await sandbox.close()
        return await verify(task, sandbox)

    verdict = asyncio.run(main())
    assert (verdict.cause, verdict.outcome) == ("infra", None)


@pytest.mark.parametrize(
    "commands",
    [
        # Modules of the work folder, in place of those of the library.
        ["printf 'import os\\nos._exit(0)\\n' | tee json.py os.py posixpath.py > /dev/null"],
        [
            "mkdir -p ~/.local/lib/python3.11/site-packages; echo 'import os; os._exit(0)' |"
            " tee ~/.local/lib/python3.11/site-packages/{usercustomize.py,x.pth} > /dev/null"
        ],
    ],
)
def test_python_reads_nothing_of_the_agents(graded, commands):
    script = (
        "python3 -m json.tool /dev/null &> /dev/null && exit\n"  # it must fail: no JSON
        "python3 -c 'import os, json; raise SystemExit(not os.path.exists(\"/app/done\"))'\n"
        "echo $((! $?)) > /logs/verifier/reward.txt\n"
    )
    verdict = graded(script, *commands)
    assert (verdict.outcome, verdict.cause) == (False, "no_report")


def test_tests_that_change_themselves_are_flagged(graded):
    """The agent's own work, run by the tests, could rewrite what has not run yet."""
    script = "bash /app/work\ntrue\necho 0 > /logs/verifier/reward.txt\n"
    attack = "echo 'echo \"echo 1 > /logs/verifier/reward.txt\" > /tests/test.sh' > work"
    verdict = graded(script, attack)
    assert (verdict.cause, verdict.outcome, reward(verdict)) == ("tampered", False, 0.0)
    assert verdict.output == "/tests/test.sh was changed while the tests ran"
