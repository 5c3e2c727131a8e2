"""What a verifier leaves behind, read with suspicion: its report of single tests, and its own number."""

import json
import math
from xml.etree import ElementTree

from t1jax.types import Assertion

MAX_NAME = 1000  # characters of a test's name; what is beyond is cut off


def read_report(ctrf: bytes | None, junit: bytes | None) -> tuple[tuple[Assertion, ...], str]:
    """The single tests, and "report" or why there are none. ctrf.json counts where there is one."""
    if ctrf is None and junit is None:
        return (), "no_report"
    try:
        assertions = _read_junit(junit) if ctrf is None else _read_ctrf(ctrf)
    except (ValueError, LookupError, TypeError, RecursionError, ElementTree.ParseError):
        return (), "bad_report"
    return assertions, "report" if assertions else "no_tests"


def _read_ctrf(data: bytes) -> tuple[Assertion, ...]:
    tests = json.loads(data)["results"]["tests"]
    return tuple(Assertion(_name(t["name"]), t["status"] == "passed") for t in tests)


def _read_junit(data: bytes) -> tuple[Assertion, ...]:
    """Test cases at any depth; one that failed, broke or was skipped has a child that says so."""
    if b"<!" in data.replace(b"<![CDATA[", b""):  # entities that unfold without end
        raise ValueError("junit.xml declares a document type")
    cases = ElementTree.fromstring(data).iter("testcase")
    return tuple(
        Assertion(
            _name("::".join(filter(None, (case.get("classname"), case.attrib["name"])))),
            not any(case.find(tag) is not None for tag in ("failure", "error", "skipped")),
        )
        for case in cases
    )


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
