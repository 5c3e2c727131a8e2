"""The Agent Trajectory Interchange Format, ATIF-v1.8: which keys and values a document may have.

After Harbor's RFC 0001 (rfcs/0001-trajectory-format.md) and its models, which forbid all other keys. Versions
since 1.0 only added fields, so documents of all of them are read by the same rules. Optional keys may be null.
"""

import math
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

VERSION = "ATIF-v1.8"
VERSIONS = tuple(f"ATIF-v1.{minor}" for minor in range(9))
SOURCES = ("system", "user", "agent")
IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")
AGENT_ONLY = ("model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics")

Check = Callable[[Any, str], None]  # (value, its place): raises AtifError


class AtifError(ValueError):
    """A document that is not ATIF: one line naming the place and what is wrong."""


def check(document: Any) -> None:
    """Raises AtifError for the first deviation, such as "steps[3].metrics: unknown key x"."""
    try:
        _trajectory(document, "")
    except RecursionError:
        _fail("", "subagent_trajectories are nested too deeply")


def _fail(place: str, message: str) -> NoReturn:
    raise AtifError(f"{place.removeprefix('.') or 'trajectory'}: {message}")


def _is(good: Callable[[Any], bool], name: str) -> Check:
    def check_value(value, place):
        if not good(value):
            _fail(place, f"is not {name}")

    return check_value


def _all(good: Callable[[Any], bool], name: str) -> Check:
    """A list of plain values, of which there may be millions."""

    def check_values(value, place):
        _list(value, place)
        if not all(map(good, value)):
            i = next(i for i, item in enumerate(value) if not good(item))
            _fail(f"{place}[{i}]", f"is not {name}")

    return check_values


COUNT = (lambda x: type(x) is int and x >= 0), "a count"
NUMBER = (lambda x: type(x) in (int, float) and math.isfinite(x)), "a finite number"
_count, _number = _is(*COUNT), _is(*NUMBER)
_text = _is(lambda x: isinstance(x, str), "a string")
_flag = _is(lambda x: isinstance(x, bool), "true or false")
_anything = _is(lambda x: isinstance(x, dict), "an object")
_list = _is(lambda x: isinstance(x, list), "a list")


def _one_of(*allowed: str) -> Check:
    def check_choice(value, place):
        if value not in allowed:
            _fail(place, f"{value!r} is none of {', '.join(allowed)}")

    return check_choice


def _each(item: Check) -> Check:
    def check_list(value, place):
        _list(value, place)
        for i, entry in enumerate(value):
            item(entry, f"{place}[{i}]")

    return check_list


def _object(required: dict[str, Check], optional: dict[str, Check]) -> Check:
    fields = required | optional

    def check_object(value, place):
        _anything(value, place)
        for name in value:
            if name not in fields:
                _fail(place, f"unknown key {name}")
        for name in required:
            if value.get(name) is None:
                _fail(place, f"lacks {name}")
        for name, item in value.items():
            if item is not None:
                fields[name](item, f"{place}.{name}")

    return check_object


def _timestamp(value, place):
    _text(value, place)
    try:
        datetime.fromisoformat(value)
    except ValueError:
        _fail(place, f"{value!r} is no time as ISO 8601 has it")


_image = _object({"media_type": _one_of(*IMAGES), "path": _text}, {})
_part_fields = _object({"type": _one_of("text", "image")}, {"text": _text, "source": _image})


def _part(value, place):
    _part_fields(value, place)
    wanted, other = ("text", "source") if value["type"] == "text" else ("source", "text")
    if value.get(wanted) is None or value.get(other) is not None:
        _fail(place, f"of type {value['type']} needs {wanted} and no {other}")


def _content(value, place):
    """Text, or a list of parts that are text or images."""
    if not isinstance(value, str | list):
        _fail(place, "is neither a string nor a list of parts")
    if isinstance(value, list):
        _each(_part)(value, place)


def _effort(value, place):
    if not isinstance(value, str):
        _number(value, place)


_reference_fields = _object(
    {}, {"trajectory_id": _text, "trajectory_path": _text, "session_id": _text, "extra": _anything}
)


def _reference(value, place):
    _reference_fields(value, place)
    if value.get("trajectory_id") is None and value.get("trajectory_path") is None:
        _fail(place, "lacks both trajectory_id and trajectory_path")


_agent = _object(
    {"name": _text, "version": _text},
    {"model_name": _text, "tool_definitions": _each(_anything), "extra": _anything},
)
_tool_call = _object(
    {"tool_call_id": _text, "function_name": _text, "arguments": _anything}, {"extra": _anything}
)
_result = _object(
    {},
    {
        "source_call_id": _text,
        "content": _content,
        "subagent_trajectory_ref": _each(_reference),
        "extra": _anything,
    },
)
_metrics_fields = _object(
    {},
    {
        "prompt_tokens": _count,
        "completion_tokens": _count,
        "cached_tokens": _count,
        "cost_usd": _number,
        "prompt_token_ids": _all(*COUNT),
        "completion_token_ids": _all(*COUNT),
        "logprobs": _all(*NUMBER),
        "extra": _anything,
    },
)


def _metrics(value, place):
    _metrics_fields(value, place)
    ids, logprobs = value.get("completion_token_ids"), value.get("logprobs")
    if ids is not None and logprobs is not None and len(ids) != len(logprobs):
        _fail(place, f"{len(logprobs)} logprobs of {len(ids)} completion_token_ids")


_final_metrics = _object(
    {},
    {
        "total_prompt_tokens": _count,
        "total_completion_tokens": _count,
        "total_cached_tokens": _count,
        "total_cost_usd": _number,
        "total_steps": _count,
        "extra": _anything,
    },
)
_step_fields = _object(
    {"step_id": _count, "source": _one_of(*SOURCES), "message": _content},
    {
        "timestamp": _timestamp,
        "model_name": _text,
        "reasoning_effort": _effort,
        "reasoning_content": _text,
        "tool_calls": _each(_tool_call),
        "observation": _object({"results": _each(_result)}, {}),
        "metrics": _metrics,
        "is_copied_context": _flag,
        "llm_call_count": _count,
        "extra": _anything,
    },
)


def _step(value, place):
    _step_fields(value, place)
    given = {name for name, item in value.items() if item is not None}
    for name in AGENT_ONLY:
        if value["source"] != "agent" and name in given:
            _fail(place, f"{name} belongs to agent steps, this one is of the {value['source']}")
    for name in ("metrics", "reasoning_content"):
        if value.get("llm_call_count") == 0 and name in given:
            _fail(place, f"{name} needs a call of the model, llm_call_count is 0")
    calls = {call["tool_call_id"] for call in value.get("tool_calls") or []}
    for i, result in enumerate((value.get("observation") or {}).get("results", [])):
        source = result.get("source_call_id")
        if source is not None and source not in calls:
            _fail(f"{place}.observation.results[{i}]", f"source_call_id {source!r} is no call here")


def _trajectory(value, place):
    _trajectory_fields(value, place)
    if not value["steps"]:
        _fail(f"{place}.steps", "is empty")
    for i, step in enumerate(value["steps"]):
        if step["step_id"] != i + 1:
            _fail(f"{place}.steps[{i}]", f"step_id {step['step_id']} should be {i + 1}")
    seen = set()
    for i, inner in enumerate(value.get("subagent_trajectories") or []):
        name = inner.get("trajectory_id")
        if name is None or name in seen:
            _fail(f"{place}.subagent_trajectories[{i}]", "needs a trajectory_id of its own")
        seen.add(name)


_trajectory_fields = _object(
    {"schema_version": _one_of(*VERSIONS), "agent": _agent, "steps": _each(_step)},
    {
        "session_id": _text,
        "trajectory_id": _text,
        "notes": _text,
        "final_metrics": _final_metrics,
        "continued_trajectory_ref": _text,
        "subagent_trajectories": _each(_trajectory),
        "extra": _anything,
    },
)
