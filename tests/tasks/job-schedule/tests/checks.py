import json
from itertools import combinations
from pathlib import Path

import pytest

SHORTEST = 17
JOBS = {
    "dig": (3, (), None),
    "pump": (2, (), 2),
    "frame": (4, ("dig",), 1),
    "pour": (3, ("dig", "pump"), 2),
    "cure": (5, ("pour",), 2),
    "wire": (4, ("frame",), None),
    "roof": (2, ("frame", "pour"), 1),
    "pipe": (3, ("pump",), None),
    "paint": (2, ("wire", "cure"), None),
    "fence": (5, (), None),
}


@pytest.fixture
def plan():
    """Name -> (machine, start, end)."""
    plan = json.loads(Path("/app/plan.json").read_text())
    return {n: (p["machine"], p["start"], p["start"] + JOBS[n][0]) for n, p in plan.items()}


def test_every_job_is_planned(plan):
    assert set(plan) == set(JOBS)
    assert all(type(start) is int and start >= 0 for _, start, _ in plan.values())


def test_machines_suit(plan):
    for name, (machine, _, _) in plan.items():
        assert machine in ((JOBS[name][2],) if JOBS[name][2] else (1, 2))


def test_order_is_kept(plan):
    assert set(plan) == set(JOBS)
    for name, (_, start, _) in plan.items():
        assert all(plan[before][2] <= start for before in JOBS[name][1])


def test_one_job_at_a_time(plan):
    assert set(plan) == set(JOBS)
    for (m, start, end), (n, other_start, other_end) in combinations(plan.values(), 2):
        assert m != n or end <= other_start or other_end <= start


def test_hours_are_those_of_the_plan(plan):
    last = max(end for _, _, end in plan.values())
    assert int(Path("/app/hours.txt").read_text()) == last


def test_it_is_short(plan):
    assert len(plan) == len(JOBS) and max(end for _, _, end in plan.values()) <= SHORTEST + 2


def test_it_is_the_shortest():
    assert int(Path("/app/hours.txt").read_text()) == SHORTEST
