"""What a reply asks for, and what the agent reads back. Two protocols: `bash` and Terminus-2 (`terminus`).

Parsing reads text only; the sampled ids are never touched, whatever the reply looks like. Terminus-2 is the
protocol of Harbor's agent of that name: what is an error, what a warning and what is repaired is as there, the
words are ours.
"""

import dataclasses
import json
from typing import Literal

from t1jax.types import ExecResult

Protocol = Literal["bash", "terminus"]

DEFAULT_WAIT_S = 1.0
MAX_WAIT_S = 60.0
FIELDS = ("analysis", "plan", "commands")  # needed, and expected in this order

SILENT = "ok"  # what the agent reads of a command that printed nothing
CONFIRM = (
    "Is the task complete? It is graded as it stands now, and nothing can be changed after that. If it is, "
    'reply with "task_complete": true once more.'
)

SYSTEM: dict[str, str] = {
    "bash": "Reply with one bash block per turn. Reply with a submit block when done.",
    "terminus": """\
You solve a task in a Linux terminal: a tmux session of 160 columns and 40 rows. Each turn you read what the \
terminal shows and reply with one JSON object, and nothing around it:

{
  "analysis": "what the terminal shows, what is done and what is left",
  "plan": "what you do next and why",
  "commands": [{"keystrokes": "ls -la\\n", "duration": 0.1}],
  "task_complete": false
}

Keystrokes are typed as they are: text is only run when it ends in a newline. Keystrokes that are a key's name \
in tmux, such as C-c, C-d, Escape or Up, press that key; they need commands of their own. The duration is how many \
seconds to wait before the next command, or before you read the terminal: 0.1 for what is done at once, more for \
what takes longer, 60 at most. You can go on waiting with empty keystrokes. An empty list of commands only looks \
at the terminal. Set task_complete when the task is done; you will be asked to confirm it.""",
}


@dataclasses.dataclass(frozen=True)
class Line:
    """A command for the shell, or keystrokes for the terminal, after which it waits `wait_s` seconds."""

    text: str
    wait_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Command:
    """Run these, in order."""

    lines: tuple[Line, ...]
    warnings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Submit:
    """The agent says that it is done, after `lines` (terminus may send some along)."""

    lines: tuple[Line, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Malformed:
    """No action could be read; `message` says why."""

    message: str
    warnings: tuple[str, ...] = ()


Action = Command | Submit | Malformed


def parse(text: str, protocol: Protocol) -> Action:
    """Reads a reply (without its stop token)."""
    if "\0" in text:
        return Malformed("NUL byte in the reply")
    return _parse_bash(text) if protocol == "bash" else _parse_terminus(text)


def observation(action: Action, result: ExecResult | None, protocol: Protocol) -> str:
    """The message that answers an action; `result`: what running it gave, None where nothing was run."""
    if protocol == "terminus":
        return _terminal_observation(action, result)
    if isinstance(action, Malformed):
        return action.message
    output = result.output.strip("\n")
    if result.exit_code:
        output = f"exit {result.exit_code}\n{output}".rstrip("\n")
    return output or SILENT


def _terminal_observation(action: Action, result: ExecResult | None) -> str:
    warnings = "".join(f"\n- {warning}" for warning in action.warnings)
    if isinstance(action, Malformed):
        listed = f"\nWarnings:{warnings}" if warnings else ""
        return (
            f"Nothing was run, your reply could not be read.\nError: {action.message}{listed}\n\n"
            "Reply again with one JSON object as described."
        )
    if isinstance(action, Submit):
        return f"The terminal now:\n{result.output}\n\n{CONFIRM}"
    if warnings:
        return f"Your reply was read with warnings:{warnings}\n\n{result.output}"
    return result.output


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
    """The first JSON object; where it cannot be read, one with its braces closed, or a later one."""
    objects, missing = _objects(text)
    action = _read_object(text, *objects[0]) if objects else Malformed("no JSON object found")
    if not isinstance(action, Malformed):
        return action
    repairs = [(text[start:end], "another JSON object was read") for start, end in objects[1:]]
    if missing:
        repairs.insert(0, (text + "}" * missing, "missing closing braces were added"))
    for repaired, note in repairs:
        spans, _ = _objects(repaired)
        again = _read_object(repaired, *spans[0]) if spans else action
        if not isinstance(again, Malformed):
            return dataclasses.replace(again, warnings=(f"repaired: {note}", *again.warnings))
    return action


def _objects(text: str) -> tuple[list[tuple[int, int]], int]:
    """[start, end) of what stands in balanced braces, and how many braces are open at the end."""
    found, depth, start, quoted, escaped = [], 0, 0, False, False
    for i, character in enumerate(text):
        if escaped:
            escaped = False
        elif quoted:
            escaped, quoted = character == "\\", character != '"'
        elif character == "{":
            start, depth = start if depth else i, depth + 1
        elif depth and character == '"':
            quoted = True
        elif depth and character == "}":
            depth -= 1
            if not depth:
                found.append((start, i + 1))
    return found, depth


def _read_object(text: str, start: int, end: int) -> Action:
    """{analysis, plan, commands: [{keystrokes, duration = 1.0}], task_complete = false}."""
    around = (("before", text[:start]), ("after", text[end:]))
    warnings = [f"there is text {side} the JSON object" for side, rest in around if rest.strip()]
    try:
        reply = json.loads(text[start:end])
    except (ValueError, RecursionError) as error:
        return Malformed(f"invalid JSON: {error}", tuple(warnings))
    if missing := [name for name in FIELDS if name not in reply]:
        return Malformed(f"missing fields: {', '.join(missing)}", tuple(warnings))
    if not isinstance(reply["commands"], list):
        return Malformed("commands must be a list", tuple(warnings))
    warnings += [f"{n} should be a string" for n in FIELDS[:2] if not isinstance(reply[n], str)]
    if tuple(name for name in reply if name in FIELDS) != FIELDS:
        warnings.append(f"the fields should come in the order {', '.join(FIELDS)}")
    complete = reply.get("task_complete", False)
    if not isinstance(complete, bool | str | None):
        warnings.append("task_complete should be true or false")
    if isinstance(complete, str):
        complete = complete.lower() in ("true", "1", "yes")
    lines = []
    for number, command in enumerate(reply["commands"], 1):
        line, remarks = _read_command(command, last=number == len(reply["commands"]))
        warnings += [f"command {number}: {remark}" for remark in remarks]
        if line is None and not complete:
            return Malformed(warnings.pop(), tuple(warnings))
        if line is None:  # nothing of it is typed, and the question comes all the same
            return Submit((), tuple(warnings))
        lines.append(line)
    return (Submit if complete else Command)(tuple(lines), tuple(warnings))


def _read_command(command: object, last: bool) -> tuple[Line | None, list[str]]:
    """One entry of `commands`, None where it is none, and what is to be said about it, the reason last."""
    if not isinstance(command, dict) or not isinstance(command.get("keystrokes"), str):
        return None, ["needs keystrokes, a string"]
    keys, wait, remarks = command["keystrokes"], command.get("duration"), []
    if "\0" in keys or any("\ud800" <= c <= "\udfff" for c in keys):
        return None, ["keystrokes hold a NUL or half a surrogate pair"]
    if not isinstance(wait, int | float) or wait != wait:
        remarks.append(f"duration should be a number of seconds, {DEFAULT_WAIT_S} was taken")
        wait = DEFAULT_WAIT_S
    if unknown := command.keys() - {"keystrokes", "duration"}:
        remarks.append(f"unknown fields: {', '.join(sorted(unknown))}")
    if keys and not last and not keys.endswith("\n"):
        remarks.append("no newline at its end, so the next command goes on in the same line")
    return Line(keys, float(min(max(wait, 0), MAX_WAIT_S))), remarks
