"""The text of a reply to an action. Two protocols: `bash` and Terminus-2's JSON (`terminus`).

Parsing reads text only; the sampled ids are never touched, whatever the reply looks like.
"""

import dataclasses
import json
import math
from typing import Literal

Protocol = Literal["bash", "terminus"]

MAX_WAIT_S = 60.0
MIN_WAIT_S = 1.0

SYSTEM: dict[str, str] = {
    "bash": "Reply with one bash block per turn. Reply with a submit block when done.",
    "terminus": (
        "You solve tasks in a Linux terminal. Reply with one JSON object and nothing else: "
        '{"analysis": str, "plan": str, "commands": [{"keystrokes": str, "duration": seconds}], '
        '"task_complete": bool}. Keystrokes are lines for the shell, each ended by a newline; '
        "duration is how long to wait for them, at most 60. Set task_complete when all is done."
    ),
}


@dataclasses.dataclass(frozen=True)
class Line:
    """One input for the shell. `wait_s`: the agent's own time limit for it, None where it has none."""

    text: str
    wait_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Command:
    """Run these, in order."""

    lines: tuple[Line, ...]


@dataclasses.dataclass(frozen=True)
class Submit:
    """The agent says that it is done, after `lines` (terminus may send some along)."""

    lines: tuple[Line, ...] = ()


@dataclasses.dataclass(frozen=True)
class Malformed:
    """No action could be read; `message` goes back to the agent."""

    message: str


Action = Command | Submit | Malformed


def parse(text: str, protocol: Protocol) -> Action:
    """Reads a reply (without its stop token)."""
    if "\0" in text:
        return Malformed("NUL byte in the reply")
    return _parse_bash(text) if protocol == "bash" else _parse_terminus(text)


def _parse_bash(text: str) -> Action:
    """Exactly one fenced block labelled `bash` (its body is the command) or `submit` (an action of its own).

    Only a block's label makes a submit: its name inside a command or in prose means nothing. Other
    blocks and prose are ignored.
    """
    blocks, label, body = [], None, []
    for line in text.split("\n"):
        if label is None and line.startswith("```"):
            label, body = line[3:].strip(), []
        elif label is not None and line.rstrip() == "```":
            blocks.append((label, "\n".join(body)))
            label = None
        else:
            body.append(line)
    if label is not None:
        return Malformed("block not closed")
    actions = [(label, body) for label, body in blocks if label in ("bash", "submit")]
    if len(actions) != 1:
        return Malformed(f"expected one bash or submit block, got {len(actions)}")
    label, command = actions[0]
    if label == "submit":
        return Submit()
    if not command.strip():
        return Malformed("empty bash block")
    return Command((Line(command),))


def _parse_terminus(text: str) -> Action:
    """{analysis, plan, commands: [{keystrokes, duration = 1.0}], task_complete = false}.

    Keystrokes go to the persistent shell as whole lines; tmux key names need a terminal of their own.
    """
    start = text.find("{")
    if start < 0:
        return Malformed("expected a JSON object, got none")
    try:
        reply, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        return Malformed(f"invalid JSON: {error}")
    if "{" in text[end:]:
        return Malformed("expected one JSON object, got more after it")
    if wrong := [key for key in ("analysis", "plan") if not isinstance(reply.get(key), str)]:
        return Malformed(f"{wrong[0]} must be a string")
    complete = reply.get("task_complete", False)
    if not isinstance(complete, bool):
        return Malformed("task_complete must be true or false")
    commands = reply.get("commands")
    if not isinstance(commands, list):
        return Malformed("commands must be a list")
    lines = []
    for i, command in enumerate(commands):
        line = _line(command)
        if isinstance(line, str):
            return Malformed(f"commands[{i}]: {line}")
        if line.text.strip():
            lines.append(line)
    return Submit(tuple(lines)) if complete else Command(tuple(lines))


def _line(command: object) -> Line | str:
    """One entry of `commands`, or what is wrong with it."""
    if not isinstance(command, dict) or not isinstance(command.get("keystrokes"), str):
        return "keystrokes must be a string"
    keys, wait = command["keystrokes"], command.get("duration", 1.0)
    if "\0" in keys or any("\ud800" <= c <= "\udfff" for c in keys):
        return "keystrokes hold a NUL or half a surrogate pair"
    if keys.strip() and not keys.endswith("\n"):
        return "keystrokes must end in a newline"
    if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 <= wait < math.inf:
        return "duration must be a number of seconds"
    return Line(keys.removesuffix("\n"), float(min(max(wait, MIN_WAIT_S), MAX_WAIT_S)))
