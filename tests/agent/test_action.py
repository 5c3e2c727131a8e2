"""From the text of a reply to an action."""

import json
import re

import pytest

from t1jax.agent.action import SYSTEM, Command, Line, Malformed, Submit, parse


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


def test_terminus_commands_in_order_with_their_waits():
    keys = [
        {"keystrokes": "cd a\n"},
        {"keystrokes": "make\n", "duration": 30},
        {"keystrokes": "x\n", "duration": 1e9},
        {"keystrokes": "", "duration": 5},
        {"keystrokes": "a\nb\n", "duration": 0.1},
    ]
    lines = (Line("cd a", 1.0), Line("make", 30.0), Line("x", 60.0), Line("a\nb", 1.0))
    assert parse(terminus(keys), "terminus") == Command(lines)
    assert parse(terminus(keys, task_complete=True), "terminus") == Submit(lines)
    assert parse(f"Here:\n```json\n{terminus()}\n```", "terminus") == Command(())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no object", "expected a JSON object, got none"),
        ('{"analysis": "a"', "invalid JSON"),
        ('{"analysis": "a",}', "invalid JSON"),
        ("{" * 100_000, "invalid JSON"),
        ('{"a":' * 100_000, "invalid JSON"),
        ('{"n": ' + "9" * 5000 + "}", "invalid JSON"),
        (terminus() + terminus(), "expected one JSON object"),
        ('{"plan": "p", "commands": []}', "analysis must be a string"),
        ('{"analysis": "a", "plan": 1, "commands": []}', "plan must be a string"),
        ('{"analysis": "a", "plan": "p"}', "commands must be a list"),
        (terminus(task_complete="yes"), "task_complete must be true or false"),
        (terminus(["ls\n"]), r"commands\[0\]: keystrokes must be a string"),
        (terminus([{"keystrokes": "a\n"}, {}]), r"commands\[1\]: keystrokes must be a string"),
        (terminus([{"keystrokes": "C-c"}]), r"commands\[0\]: keystrokes must end in a newline"),
        (terminus([{"keystrokes": "\0\n"}]), r"commands\[0\]: keystrokes hold a NUL"),
        (terminus([{"keystrokes": "\ud800\n"}]), r"commands\[0\]: keystrokes hold a NUL or half"),
        *(
            (terminus([{"keystrokes": "a\n", "duration": d}]), "duration must be a number")
            for d in ("1", None, True, -1, float("nan"), float("inf"))
        ),
    ],
)
def test_terminus_malformed(text, message):
    action = parse(text, "terminus")
    assert isinstance(action, Malformed)
    assert re.search(message, action.message), action.message
    assert len(action.message) < 200


def test_huge_duration_is_capped():
    keys = [{"keystrokes": "a\n", "duration": 10**400}]
    assert parse(terminus(keys), "terminus") == Command((Line("a", 60.0),))


def test_every_protocol_has_its_instructions():
    assert set(SYSTEM) == {"bash", "terminus"}
