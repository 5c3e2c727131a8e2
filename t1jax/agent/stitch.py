"""Prompts that were rendered anew each turn, joined into streams of the sampler's exact ids (TITO, T1).

A harness that keeps text sends the sampler a prompt p_i a turn and gets the ids a_i. Where p_{i+1} does not
begin with p_i || a_i, the text was changed or encoded another way. The first case that holds decides:

    strict       p_i || a_i is a prefix of p_{i+1}: the rest is appended
    normalized   p_i without its last s ids, then a_i without its last u, are a prefix of p_{i+1}
                 (a template that drops the prompt of a reply, say): what follows that prefix is appended
    retokenized  the text of a_i stands in p_{i+1}, at the edges of tokens, as other ids: what follows it is
                 appended, and the other ids never enter the stream
    split        none of them: p_{i+1} opens a new chunk of the same trial

In every case the stream keeps p_i || a_i as the sampler had them, so a sampled id is never one that was encoded
again. `boundary` is the rule for one turn, `Stitcher` the streams of a trial, `count` what came of it.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from t1jax.types import Join, Trajectory

MAX_PROMPT_DROP = 96  # s
MAX_REPLY_DROP = 16  # u

# ids -> the text of each; joined, they are the text of all.
Pieces = Callable[[np.ndarray], list[str]]


class Boundary(NamedTuple):
    """How p_{i+1} continues p_i || a_i: from `resume` on it is new. drop: (s, u), (0, 0) but for normalized."""

    case: Join
    resume: int
    drop: tuple[int, int] = (0, 0)


def boundary(prompt: np.ndarray, reply: np.ndarray, after: np.ndarray, pieces: Pieces) -> Boundary:
    """Which case joins the prompt `after` to the turn before it; ids i32[*]."""
    for drop in _drops(len(prompt), len(reply)):
        kept = np.concatenate([prompt[: len(prompt) - drop[0]], reply[: len(reply) - drop[1]]])
        if len(kept) <= len(after) and np.array_equal(kept, after[: len(kept)]):
            return Boundary("strict" if drop == (0, 0) else "normalized", len(kept), drop)
    end = _find_text(prompt, reply, after, pieces)
    return Boundary("split", 0) if end is None else Boundary("retokenized", end)


def _drops(prompt: int, reply: int) -> list[tuple[int, int]]:
    """(s, u) by s + u, then by u."""
    grid = (
        (s, u)
        for s in range(min(MAX_PROMPT_DROP, prompt) + 1)
        for u in range(min(MAX_REPLY_DROP, max(reply - 1, 0)) + 1)
    )
    return sorted(grid, key=lambda drop: (sum(drop), drop[1]))


def _find_text(prompt, reply, after, pieces: Pieces) -> int | None:
    """Where in `after` the text of `reply` ends, if it stands there between edges of tokens.

    It is looked for behind what `after` has in common with `prompt`, as the same words may have been said
    before.
    """
    text = "".join(pieces(reply))
    if not text:
        return None
    n = min(len(prompt), len(after))
    same = int(np.argmin(np.append(prompt[:n] == after[:n], False)))
    rest = pieces(after[same:])
    edges = np.cumsum([0, *map(len, rest)])
    whole, at = "".join(rest), -1
    while (at := whole.find(text, at + 1)) >= 0:
        end = np.flatnonzero(edges == at + len(text))
        if at in edges and len(end):
            return same + int(end[-1])
    return None


@dataclasses.dataclass(frozen=True)
class Audit:
    """What became of the sampler's ids, over any number of trials.

    joins: turns by how they continue the one before. drops: (s, u) of the normalized ones. sampled: ids marked
    as chosen by the policy; drifted: those of them that are not the sampler's own (of turns whose digest
    differs), which must be 0.
    """

    joins: Counter
    drops: Counter
    sampled: int
    drifted: int

    @property
    def drift(self) -> float:
        """Share of sampled positions that are not the sampler's own."""
        return self.drifted / max(self.sampled, 1)

    def __add__(self, other: "Audit") -> "Audit":
        return Audit(
            self.joins + other.joins,
            self.drops + other.drops,
            self.sampled + other.sampled,
            self.drifted + other.drifted,
        )


def count(trajectories: Iterable[Trajectory]) -> Audit:
    """Counts all turns but those that open a trial, and all ids."""
    joins, drops, sampled, drifted = Counter(), Counter(), 0, 0
    for trajectory in trajectories:
        for i, turn in enumerate(trajectory.turns):
            if i or trajectory.chunk:
                joins[turn.join] += 1
            if turn.join == "normalized":
                drops[turn.drop] += 1
            sampled += len(turn.sampled)
            drifted += turn.drifted
    return Audit(joins, drops, sampled, drifted)


class Stitcher:
    """Joins the turns of one trial into streams, one a chunk: `read` a prompt, then `add` its reply."""

    def __init__(self, pieces: Pieces):
        self.length = 0  # of the open chunk, with the prompt that was read last
        self._pieces = pieces
        self._experts: list[np.ndarray] = []  # [N-1, L, K] of each chunk
        self._last: tuple[np.ndarray, np.ndarray] | None = None
        self._prompt, self._join = np.zeros(0, np.int32), Boundary("split", 0)

    def read(self, prompt: np.ndarray) -> Boundary:
        """How the prompt joins the open chunk: its ids from `resume` on are the turn's context."""
        self._prompt, self._join = prompt, Boundary("split", 0)
        if self._last is not None:
            self._join = boundary(*self._last, prompt, self._pieces)
        context = len(prompt) - self._join.resume
        if self._join.case in ("normalized", "retokenized") and not context:
            raise ValueError(
                "nothing stands between the last reply and the next, so its last id, which was never read "
                "as it is, would predict a sampled one"
            )
        self.length = context + (0 if self._join.case == "split" else self.length)
        return self._join

    def add(self, reply: np.ndarray, experts: np.ndarray) -> None:
        """The ids chosen after the prompt, and the experts [P + S - 1, L, K] of both, row 0 on.

        Raises ValueError where the rows are not as many as that.
        """
        rows = len(self._prompt) + len(reply) - 1
        if len(experts) != rows:
            raise ValueError(f"{len(experts)} rows of experts, needed are {rows}")
        if self._join.case == "split":
            self._experts.append(experts)
        else:
            held = _bridge(self._experts[-1], experts, self._join)
            self._experts[-1] = np.concatenate([held, experts[self._join.resume :]])
        self.length += len(reply)
        self._last = self._prompt, reply

    def experts(self) -> list[np.ndarray]:
        """[N-1, L, K] of each chunk."""
        return self._experts


def _bridge(held: np.ndarray, experts: np.ndarray, join: Boundary) -> np.ndarray:
    """The rows of p_i || a_i, with one for its last id, which only the next prompt's pass has read.

    Under "strict" that row is the next prompt's own. A repaired boundary has none: it is copied from the id
    before, which nothing learns from, as the id that follows is context (`read` checks that).
    """
    if join.case == "strict":
        return np.concatenate([held, experts[join.resume - 1 : join.resume]])
    return np.concatenate([held, held[-1:]])
