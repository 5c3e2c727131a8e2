import json
from pathlib import Path

import pytest

LEVELS = {"DEBUG": 343, "INFO": 688, "WARN": 150, "ERROR": 99}
ERRORS = (16, 13, 12, 15, 6, 9, 10, 12, 6)  # on each of the first days of May


@pytest.fixture
def summary():
    return json.loads(Path("/app/summary.json").read_text())


def test_keys(summary):
    assert set(summary) == {"entries", "by_level", "errors_by_day", "busiest_service"}


def test_entries(summary):
    assert summary["entries"] == sum(LEVELS.values())


@pytest.mark.parametrize("level", LEVELS)
def test_level(summary, level):
    assert summary["by_level"][level] == LEVELS[level]


def test_errors_by_day(summary):
    assert summary["errors_by_day"] == {f"2024-05-0{1 + i}": n for i, n in enumerate(ERRORS)}


def test_busiest_service(summary):
    assert summary["busiest_service"] == "web"
