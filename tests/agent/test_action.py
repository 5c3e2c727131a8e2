"""From the text of a reply to an action."""

import functools
import json

import pytest

from t1jax.agent.action import (
    CONFIRM,
    SILENT,
    SYSTEM,
    Command,
    Line,
    Malformed,
    Submit,
    observation,
    parse,
)
from t1jax.types import ExecResult


def run(*lines: str) -> Command:
    return Command(tuple(Line(text) for text in lines))


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("```bash\nls -l\n```", run("ls -l")),
        ("I look first.\n```bash\nls\n```\nThen I go on.", run("ls")),
        ("```bash\ncd a\nls\n```\n", run("cd a\nls")),
        ("```bash \nls\n``` ", run("ls")),
        ("```bash\n\n  ls\n\n```", run("\n  ls\n")),
        ("```bash\necho '```'\n```", run("echo '```'")),
        ("```python\nprint()\n```\n```bash\nls\n```", run("ls")),
        ("```submit\n```", Submit()),
        ("Done.\n```submit\n```", Submit()),
        # trap 21: the word alone means nothing, wherever it stands
        ("```bash\ngrep submit run.sh\n```", run("grep submit run.sh")),
        ("```bash\necho '```submit'; echo '```'\n```", run("echo '```submit'; echo '```'")),
        ("submit", Malformed("expected one bash or submit block, got 0")),
        ("", Malformed("expected one bash or submit block, got 0")),
        ("`ls`", Malformed("expected one bash or submit block, got 0")),
        ("```sh\nls\n```", Malformed("expected one bash or submit block, got 0")),
        ("```bash\nls\n```\n```submit\n```", Malformed("expected one bash or submit block, got 2")),
        ("```bash\na\n```\n```bash\nb\n```", Malformed("expected one bash or submit block, got 2")),
        ("```bash\nls", Malformed("block not closed")),
        ("```bash\nls\n```\n```submit", Malformed("block not closed")),
        ("```bash\n \n```", Malformed("empty bash block")),
        ("```bash\n```", Malformed("empty bash block")),
        ("```bash\necho \0\n```", Malformed("NUL byte in the reply")),
    ],
)
def test_bash(text, action):
    assert parse(text, "bash") == action


def terminus(commands=(), **fields) -> str:
    return json.dumps({"analysis": "a", "plan": "p", "commands": list(commands), **fields})


def test_terminus_keystrokes_stay_as_they_are():
    keys = [
        {"keystrokes": "cd a\n", "duration": 0.1},
        {"keystrokes": "C-c", "duration": 30},
        {"keystrokes": "a\nb\n", "duration": 1e9},
        {"keystrokes": "", "duration": -5},
        {"keystrokes": " \u001b[A", "duration": 10**400},
    ]
    waits = (0.1, 30.0, 60.0, 0.0, 60.0)
    lines = tuple(Line(k["keystrokes"], wait) for k, wait in zip(keys, waits, strict=True))
    remark = "command 2: no newline at its end, so the next command goes on in the same line"
    assert parse(terminus(keys), "terminus") == Command(lines, (remark,))
    assert parse(terminus(keys, task_complete=True), "terminus") == Submit(lines, (remark,))
    assert parse(terminus(), "terminus") == Command(())


A = {"keystrokes": "a\n", "duration": 1}


@pytest.mark.parametrize(
    ("text", "warnings"),
    [
        (f"Well. {terminus()}", ["there is text before the JSON object"]),
        (f"{terminus()} {terminus()}", ["there is text after the JSON object"]),
        (
            f'a "quote {terminus()}\n```',
            ["there is text before the JSON object", "there is text after the JSON object"],
        ),
        ('{"commands": [], "plan": "", "analysis": ""}', ["the fields should come in the order"]),
        ('{"analysis": 1, "plan": null, "commands": []}', ["analysis should", "plan should be"]),
        (terminus(task_complete=1.5), ["task_complete should be true or false"]),
        (terminus([{"keystrokes": "a\n"}]), ["command 1: duration should be a number"]),
        *(
            (terminus([{"keystrokes": "a\n", "duration": d}]), ["command 1: duration should be a"])
            for d in ("1", None, [], float("nan"))
        ),
        (terminus([A | {"is_blocking": True}]), ["command 1: unknown fields: is_blocking"]),
        # Repaired.
        (terminus([A])[:-1], ["repaired: missing closing braces"]),
        ("{oh} " + terminus([A]), ["repaired: another JSON object was read"]),
        ('{"a": 1} ' + terminus([A]), ["repaired: another JSON object was read"]),
        # Done is done, whatever the commands are; none of them is typed.
        (terminus([A, 5], task_complete=True), ["command 2: needs keystrokes, a string"]),
    ],
)
def test_terminus_is_read_with_warnings(text, warnings):
    action = parse(text, "terminus")
    assert isinstance(action, Command | Submit)
    for found, wanted in zip(action.warnings, warnings, strict=True):
        assert found.startswith(wanted)
    assert all(line.wait_s == 1.0 for line in action.lines)


@pytest.mark.parametrize(
    ("value", "kind"),
    [("true", Submit), ("YES", Submit), ("1", Submit), ("no", Command), (None, Command)],
)
def test_terminus_completion_may_be_a_word(value, kind):
    assert type(parse(terminus(task_complete=value), "terminus")) is kind


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no object", "no JSON object found"),
        ("", "no JSON object found"),
        ('{"analysis": "a"', "no JSON object found"),
        ('{"analysis": "a", "plan": "{', "no JSON object found"),
        ('{"analysis": "a",}', "invalid JSON"),
        ("{" * 100_000, "no JSON object found"),
        ('{"a":' * 100_000, "no JSON object found"),
        ('{"n": ' + "9" * 5000 + "}", "invalid JSON"),
        ('{"plan": "p", "commands": []}', "missing fields: analysis"),
        ('{"plan": "p"}', "missing fields: analysis, commands"),
        ('{"analysis": "a", "plan": "p", "commands": {}}', "commands must be a list"),
        (terminus(["ls\n"]), "command 1: needs keystrokes, a string"),
        (terminus([A, {}]), "command 2: needs keystrokes, a string"),
        (terminus([A, {"keystrokes": 1}]), "command 2: needs keystrokes, a string"),
        (terminus([{"keystrokes": "\0\n"}]), "command 1: keystrokes hold a NUL"),
        (terminus([{"keystrokes": "\ud800\n"}]), "command 1: keystrokes hold a NUL or half"),
    ],
)
def test_terminus_malformed(text, message):
    action = parse(text, "terminus")
    assert isinstance(action, Malformed)
    assert action.message.startswith(message)
    assert len(action.message) < 200


def test_what_the_terminus_agent_reads():
    screen = ExecResult(0, "Current Terminal Screen:\n$", 1.0, False)
    read = functools.partial(observation, protocol="terminus")
    assert read(parse(terminus([A]), "terminus"), screen) == screen.output
    warned = read(parse(f"Hm {terminus()} Hm", "terminus"), screen)
    assert warned == (
        "Your reply was read with warnings:\n- there is text before the JSON object\n"
        f"- there is text after the JSON object\n\n{screen.output}"
    )
    asked = read(parse(f"Hm {terminus(task_complete=True)}", "terminus"), screen)
    assert asked == f"The terminal now:\n{screen.output}\n\n{CONFIRM}"
    wrong = read(parse("Hm {}", "terminus"), None)
    assert wrong.startswith("Nothing was run, your reply could not be read.\nError: missing fields")
    assert "\nWarnings:\n- there is text before the JSON object\n\nReply again" in wrong


def test_what_the_bash_agent_reads():
    ran = parse("```bash\nls\n```", "bash")
    for code, output, read in ((0, "a\n\n", "a"), (0, "\n", SILENT), (3, "", "exit 3")):
        assert observation(ran, ExecResult(code, output, 0.0, False), "bash") == read
    assert observation(parse("", "bash"), None, "bash").startswith("expected one bash")


def test_every_protocol_has_its_instructions():
    assert set(SYSTEM) == {"bash", "terminus"}
