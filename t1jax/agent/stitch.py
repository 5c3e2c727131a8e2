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
again. `boundary` is the rule for one turn, `Stitcher` the streams of a trial, `Audit` what is counted.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

MAX_PROMPT_DROP = 96  # s
MAX_REPLY_DROP = 16  # u

Case = Literal["strict", "normalized", "retokenized", "split"]
Pieces = Callable[
    [np.ndarray], list[str]
]  # ids -> the text of each; joined, they are the text of all


class Boundary(NamedTuple):
    """How p_{i+1} continues p_i || a_i: from `resume` on it is new. drop: (s, u), (0, 0) but for normalized."""

    case: Case
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


@dataclasses.dataclass
class Audit:
    """What stitching did, over any number of trials.

    cases: boundaries by case. drops: normalized ones by (s, u). sampled: ids in streams that are marked as
    chosen by the policy; drifted: those of them that the sampler did not return, which must be 0.
    """

    cases: Counter = dataclasses.field(default_factory=Counter)
    drops: Counter = dataclasses.field(default_factory=Counter)
    sampled: int = 0
    drifted: int = 0

    @property
    def drift(self) -> float:
        """Share of sampled positions that are not the sampler's own."""
        return self.drifted / max(self.sampled, 1)

    def __add__(self, other: "Audit") -> "Audit":
        return Audit(
            self.cases + other.cases,
            self.drops + other.drops,
            self.sampled + other.sampled,
            self.drifted + other.drifted,
        )


class Chunk(NamedTuple):
    """One stream: context and reply of each turn, and the experts u8|u16[N-1, L, K] of its tokens.

    parts: (context i32[C], reply i32[S], number of the turn) in order.
    """

    parts: list[tuple[np.ndarray, np.ndarray, int]]
    experts: np.ndarray


class Stitcher:
    """Collects the turns of one trial as (prompt, reply, experts) and joins them."""

    def __init__(self, pieces: Pieces):
        self.audit = Audit()
        self._pieces = pieces
        self._chunks: list[Chunk] = []
        self._last: tuple[np.ndarray, np.ndarray] | None = None

    def add(self, turn: int, prompt: np.ndarray, reply: np.ndarray, experts: np.ndarray) -> Case:
        """One turn: what the sampler read and chose, and its experts [P + S - 1, L, K], row 0 on.

        Raises ValueError where the rows are not as many as that.
        """
        rows = len(prompt) + len(reply) - 1
        if len(experts) != rows:
            raise ValueError(f"turn {turn}: {len(experts)} rows of experts, needed are {rows}")
        if self._last is None:
            join = Boundary("split", 0)
        else:
            join = boundary(*self._last, prompt, self._pieces)
            self.audit.cases[join.case] += 1
            if join.case == "normalized":
                self.audit.drops[join.drop] += 1
        context = prompt[join.resume :]
        if join.case in ("normalized", "retokenized") and not len(context):
            raise ValueError(
                f"turn {turn}: nothing stands between the last reply and this one, so its last id, which "
                "was never read as it is, would predict a sampled one"
            )
        if join.case == "split":
            self._chunks.append(Chunk([(context, reply, turn)], experts))
        else:
            chunk = self._chunks[-1]
            held = _bridge(chunk.experts, experts, join)
            new = experts[join.resume :]
            self._chunks[-1] = Chunk(
                [*chunk.parts, (context, reply, turn)], np.concatenate([held, new])
            )
        self.audit.sampled += len(reply)
        self._last = prompt, reply
        return join.case

    def chunks(self) -> list[Chunk]:
        return self._chunks


def _bridge(held: np.ndarray, experts: np.ndarray, join: Boundary) -> np.ndarray:
    """The rows of p_i || a_i, with one for its last id, which only the next prompt's pass has read.

    Under "strict" that row is the next prompt's own. A repaired boundary has none: it is copied from the id
    before, which nothing learns from, as the id that follows is context (`add` checks that).
    """
    if join.case == "strict":
        return np.concatenate([held, experts[join.resume - 1 : join.resume]])
    return np.concatenate([held, held[-1:]])
