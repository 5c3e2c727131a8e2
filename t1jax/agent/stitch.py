"""Prompts that were rendered anew each turn, joined into streams of the sampler's exact ids (TITO, T1).

A harness that keeps text sends the sampler a prompt p_i a turn and gets the ids a_i. Where p_{i+1} does not
begin with p_i || a_i, the text was changed or encoded another way. The first case that holds decides:

    strict       p_i || a_i is a prefix of p_{i+1}: the rest is appended
    normalized   p_i without its last s ids, then a_i without its last u, are a prefix of p_{i+1}
                 (a template that drops the prompt of a reply, say): what follows that prefix is appended
    retokenized  the same by text, s in characters and u = 0, with a_i between edges of tokens: what follows
                 it is appended, and the other ids never enter the stream
    split        none of them: p_{i+1} opens a new chunk of the same trial

Only the turn's own context may be dropped, which is what p_i appended to the stream: all before it, earlier
replies too, must be repeated, or the stream would say what the sampler no longer read. In every case the stream keeps p_i || a_i as the sampler had them, so a sampled id is never one that was encoded
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


def boundary(
    prompt: np.ndarray, reply: np.ndarray, after: np.ndarray, pieces: Pieces, begin: int = 0
) -> Boundary:
    """Which case joins the prompt `after` to the turn before it; ids i32[*].

    begin: where in `prompt` the turn's own context begins.
    """
    drop = _drop(prompt, reply, after, begin)
    if drop == (0, 0):
        return Boundary("strict", len(prompt) + len(reply))
    found = None
    if drop is None or drop[1]:
        found = find_text(prompt, reply, after, pieces, begin)
    if drop is None and found is None:
        return Boundary("split", 0)
    # Where the dropped end came back as other ids, it must not be read twice.
    resume = found[1] if found else len(prompt) + len(reply) - sum(drop)
    if resume == len(after):
        # The reply's last id, which was never read as it is, would predict a sampled one.
        return Boundary("split", 0)
    return Boundary("normalized", resume, drop) if drop else Boundary("retokenized", resume)


def _drop(prompt, reply, after, begin: int) -> tuple[int, int] | None:
    """(s, u) of the least s + u, and of those the least u, for which the rest is a prefix of `after`."""
    shared = _shared(prompt, after)
    best = None
    for s in range(len(prompt) - shared, min(MAX_PROMPT_DROP, len(prompt) - begin) + 1):
        if best is not None and s > sum(best):
            break
        u = len(reply) - _shared(reply, after[len(prompt) - s :])
        if u <= min(MAX_REPLY_DROP, max(len(reply) - 1, 0)):
            best = min((s, u), best or (s, u), key=lambda drop: (sum(drop), drop[1]))
    return best


def _shared(a: np.ndarray, b: np.ndarray) -> int:
    """How many ids both begin with."""
    n = min(len(a), len(b))
    return int(np.argmin(np.append(a[:n] == b[:n], False)))


def find_text(
    prompt: np.ndarray, reply: np.ndarray, after: np.ndarray, pieces: Pieces, begin: int = 0
) -> tuple[int, int] | None:
    """[first, last) of the ids in `after` that spell `reply`, if they do so between edges of tokens.

    It must stand where a reply to `prompt` does: the text before it is that of the prompt, of which only an
    end behind id `begin` may be missing, and as little as can be. The same words may have been said before,
    and may be repeated later.
    """
    words = "".join(pieces(reply))
    if not words:
        return None
    same = min(_shared(prompt, after), begin)  # need not be spelt
    before, rest = "".join(pieces(prompt[same:])), pieces(after[same:])
    text, edges = "".join(rest), text_edges(rest)
    least = len("".join(pieces(prompt[same:begin])))
    for at in edges[(least <= edges) & (edges <= len(before))][::-1]:
        if text.startswith(words, at) and before.startswith(text[:at]):
            ends = np.flatnonzero(edges == at + len(words))
            if len(ends):
                return same + int(np.searchsorted(edges, at)), same + int(ends[-1])
    return None


def text_edges(words: list[str]) -> np.ndarray:
    """i64[n + 1]: where each of n pieces of text begins, and where the last one ends."""
    return np.cumsum([0, *map(len, words)])


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
        self._held = 0  # of it up to the last reply
        self._pieces = pieces
        self._experts: list[list[np.ndarray]] = []  # parts of [N-1, L, K], by chunk
        self._last: tuple[np.ndarray, np.ndarray, int] | None = None  # prompt, reply, begin
        self._prompt, self._join = np.zeros(0, np.int32), Boundary("split", 0)

    @property
    def rows(self) -> int:
        """How many rows of experts of the prompt are held, or not needed."""
        return max(self._join.resume - 1, 0)

    def split(self) -> None:
        """The next prompt opens a chunk, whatever it says."""
        self._last = None

    def read(self, prompt: np.ndarray) -> Boundary:
        """How the prompt joins the open chunk: its ids from `resume` on are the turn's context.

        Another prompt may be read instead, until a reply is added.
        """
        self._prompt, self._join = prompt, Boundary("split", 0)
        if self._last is not None:
            last, reply, begin = self._last
            self._join = boundary(last, reply, prompt, self._pieces, begin)
        case, resume, _ = self._join
        self.length = len(prompt) - resume + (0 if case == "split" else self._held)
        return self._join

    def add(self, reply: np.ndarray, experts: np.ndarray, start: int) -> None:
        """The ids chosen after the prompt, and the experts of both from row `start` on, [.., L, K].

        The row of the reply's last id comes with the next prompt under "strict". At a repaired boundary no
        pass has read that id where it stands: the row before is copied, from which nothing is learnt, as the
        id that follows is context. Raises ValueError where the rows are not those that are needed.
        """
        end = len(self._prompt) + len(reply) - 1
        if not 0 <= start <= self.rows or start + len(experts) != end:
            raise ValueError(
                f"the sampler returned experts of tokens [{start}, {start + len(experts)}), "
                f"needed are [{self.rows}, {end})"
            )
        case, resume = self._join.case, self._join.resume
        if case == "split":
            self._experts.append([experts])
        elif case == "strict":
            self._experts[-1].append(experts[resume - 1 - start :])
        else:
            self._experts[-1] += [self._experts[-1][-1][-1:], experts[resume - start :]]
        self._held = self.length = self.length + len(reply)
        self._last = self._prompt, reply, resume

    def experts(self) -> list[np.ndarray]:
        """[N-1, L, K] of each chunk."""
        return [np.concatenate(parts) for parts in self._experts]
