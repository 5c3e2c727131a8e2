"""Seconds of a call, and of sides that take turns."""

import math
import time
from collections.abc import Callable, Sequence

ROUNDS = 3


def seconds_of(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def best_of(run: Callable[[], object], rounds: int) -> float:
    """The least seconds of a call."""
    return min(seconds_of(run) for _ in range(rounds))


def take_turns(*sides: Sequence[Callable[[], float]]) -> list[float]:
    """The least seconds of each side, which is the ways it may go: each returns its seconds, the fastest counts.

    A first round, in which things are compiled and allocated, is left out.
    """
    best = [math.inf] * len(sides)
    for round_ in range(ROUNDS + 1):
        for i, ways in enumerate(sides):
            seconds = min(way() for way in ways)
            if round_:
                best[i] = min(best[i], seconds)
    return best
