"""Who holds which cache slot: the bookkeeping behind the embedded sampler, without any device or lock.

A trial holds its slot from its first request to its release. Giving an idle trial's slot away meanwhile
would mean to rebuild its cache in other pieces, which differ in their last bits: replies would then depend
on how busy the sampler was.
"""

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(eq=False)
class Request:
    """One reply being made: the stream it continues, and what has been sampled for it so far."""

    trial: int
    turn: int
    tokens: np.ndarray  # i32[N]
    experts_start: int
    max_new: int
    future: asyncio.Future
    started: float
    cancelled: bool = False
    waited: int = 0  # decode steps since it got its slot
    first_row: int = 0  # position of the first of `experts`
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    experts: list[np.ndarray] = dataclasses.field(default_factory=list)  # [rows, L, K] each


@dataclasses.dataclass(eq=False)
class Slot:
    """A cache slot in use: the tokens it has read, and the request being served."""

    index: int
    tokens: np.ndarray
    request: Request | None = None
    released: bool = False

    @property
    def read(self) -> int:
        return len(self.tokens)

    @property
    def piece(self) -> np.ndarray:
        """What of the request's stream is still to be read."""
        return self.request.tokens[self.read :]


class SlotTable:
    """A request waits for a slot, reads its stream, decodes its reply, and leaves.

    `rewritten` counts tokens a slot had read that the trial's next stream did not repeat.
    """

    def __init__(self, slots: int, rows: int, buckets: Sequence[int], patience: int):
        self.waiting: list[Request] = []  # oldest first, as the other two
        self.reading: list[Slot] = []
        self.decoding: list[Slot] = []
        self.rewritten = 0
        self._rows, self._buckets, self._patience = rows, sorted(buckets), patience
        self._free = list(range(slots))
        self._held: dict[int, Slot] = {}  # by trial

    def requests(self) -> list[Request]:
        return [*self.waiting, *(slot.request for slot in [*self.reading, *self.decoding])]

    def admit(self) -> None:
        """Drops cancelled requests; gives each waiting one its trial's slot, else a free one if any."""
        for slot in [*self.reading, *self.decoding]:
            if slot.request.cancelled:
                self.leave(slot)
        waiting, self.waiting = self.waiting, []
        for request in waiting:
            if request.cancelled:
                continue
            slot = self._held.get(request.trial)
            if slot is None and self._free:
                slot = self._held[request.trial] = Slot(self._free.pop(0), request.tokens[:0])
            if slot is None or slot.request is not None:
                self.waiting.append(request)
            else:
                self._enter(slot, request)

    def bucket(self, slot: Slot) -> int:
        """The length of the prefill call that reads the slot's next piece."""
        return next((b for b in self._buckets if b >= len(slot.piece)), self._buckets[-1])

    def next_group(self, hurry: bool) -> list[Slot]:
        """Slots to read in one call: as many as it has rows, or fewer where one of them waited enough.

        They share a bucket, which depends on nothing but the slot's own stream. `hurry`: nothing is
        gained by waiting.
        """
        groups = defaultdict(list)
        for slot in self.reading:
            groups[self.bucket(slot)].append(slot)
        for group in groups.values():
            full = len(group) >= self._rows
            if full or hurry or group[0].request.waited >= self._patience:
                return group[: self._rows]
        return []

    def start_decoding(self, slot: Slot) -> None:
        self.reading.remove(slot)
        self.decoding.append(slot)

    def leave(self, slot: Slot) -> None:
        """Takes a finished or cancelled request off its slot."""
        request, slot.request = slot.request, None
        (self.reading if slot in self.reading else self.decoding).remove(slot)
        if request.cancelled or slot.released:
            self.release(request.trial)

    def release(self, trial: int) -> None:
        """Frees the trial's slot: at once, or when its request leaves."""
        slot = self._held.get(trial)
        if slot is None:
            return
        slot.released = True
        if slot.request is None:
            del self._held[trial]
            self._free.append(slot.index)

    def release_all(self) -> None:
        for trial in list(self._held):
            self.release(trial)

    def _enter(self, slot: Slot, request: Request) -> None:
        """Begins behind what the slot has read, or from nothing where that is no use for the stream."""
        if slot.read:
            n = min(slot.read, len(request.tokens))
            same = int(np.cumprod(slot.tokens[:n] == request.tokens[:n]).sum())
            self.rewritten += slot.read - same
            whole = same == slot.read < len(request.tokens)
            if not whole or request.experts_start < slot.read:
                slot.tokens = request.tokens[:0]
        slot.request, request.first_row = request, slot.read
        self.reading.append(slot)
