"""JaxSampler: the embedded sampler. Continuous batching over cache slots, same Protocol as a remote engine.

Every device call has one of a few fixed shapes, and a row's result does not depend on the other rows.
With randomness keyed by (seed, trial, turn, position) a reply is therefore the same bit for bit whoever
shares its batch and in whatever order requests arrive.
"""

import asyncio
import collections
import dataclasses
import functools
import threading
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from t1jax.model.config import ModelConfig
from t1jax.model.decode import extend, init_cache, sample, uniforms
from t1jax.types import Sampled

PATIENCE = 8  # decode steps a waiting request may see before it is prefilled in a call of its own


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; training needs top_p 1 and top_k 0. Raises ValueError for greedy decoding."""

    temperature: float
    top_p: float
    top_k: int

    def __post_init__(self):
        if not self.temperature > 0:
            raise ValueError(
                f"temperature {self.temperature} is not positive: log-probs mean nothing"
            )


@dataclasses.dataclass(eq=False)
class _Request:
    """One call of `sample` on its way through the worker."""

    trial: int
    turn: int
    tokens: np.ndarray
    experts_start: int
    max_new: int
    future: asyncio.Future
    loop: asyncio.AbstractEventLoop
    started: float
    slot: int = -1
    waited: int = 0
    first_row: int = 0  # position of the first of `experts`
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    experts: list[np.ndarray] = dataclasses.field(default_factory=list)
    cancelled: bool = False


@dataclasses.dataclass
class _Slot:
    """What a cache slot holds: the tokens read for which trial. `used` orders eviction."""

    trial: int | None = None
    tokens: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    request: _Request | None = None
    used: int = 0


class JaxSampler:
    """Implements types.Sampler. One worker thread owns the device; call `load` before the first sample.

    `slots` streams of at most `max_len` tokens stay cached between the turns of a trial. Prefill runs in
    calls of [prefill_rows, bucket]; longer prompts take several. `drifted` counts cached tokens that a
    caller's stream did not repeat: 0 where token ids are kept (TITO).
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        slots: int,
        max_len: int,
        prefill_rows: int,
        prefill_buckets: Sequence[int],
        seed: int,
        sampling: Sampling,
        stop_ids: Sequence[int],
    ):
        self.config, self.max_len, self.version = config, max_len, -1
        self.drifted = 0
        self._buckets, self._prefill_rows = sorted(prefill_buckets), prefill_rows
        self._stop = frozenset(stop_ids)
        self._dtype = np.uint8 if config.num_experts <= 256 else np.uint16
        self._slots = [_Slot() for _ in range(slots)]
        self._waiting: collections.deque[_Request] = collections.deque()
        self._active: dict[int, _Request] = {}  # by slot
        self._params = self._error = None
        self._clock, self._closed = 0, False
        self._cache = init_cache(config, slots, max_len)
        self._sampling, self._seed = sampling, np.uint32(seed)
        self._wake = threading.Condition()
        self._worker = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._worker.start()

    def load(self, params: dict, version: int) -> None:
        """Publishes weights. Raises RuntimeError while requests are in flight: none may span versions."""
        with self._wake:
            if self._waiting or self._active:
                raise RuntimeError("weights can be loaded only while no request is in flight")
            self._params, self.version = params, version
            for slot in self._slots:
                slot.trial, slot.tokens = None, slot.tokens[:0]

    async def sample(
        self, trial: int, turn: int, tokens: np.ndarray, experts_start: int, max_new: int
    ) -> Sampled:
        """See types.Sampler. Raises ValueError for a stream that cannot be continued."""
        tokens = np.asarray(tokens, np.int32)
        self._check(tokens, experts_start, max_new)
        loop = asyncio.get_running_loop()
        request = _Request(
            trial,
            turn,
            tokens,
            experts_start,
            max_new,
            loop.create_future(),
            loop,
            time.monotonic(),
        )
        with self._wake:
            if self._params is None:
                raise RuntimeError("no weights are loaded")
            if self._error is not None or self._closed:
                raise RuntimeError(f"the sampler has ended: {self._error or 'closed'}")
            self._waiting.append(request)
            self._wake.notify()
        try:
            return await request.future
        finally:
            request.cancelled = True

    async def release(self, trial: int) -> None:
        """Gives the trial's slot away."""
        with self._wake:
            for slot in self._slots:
                if slot.trial == trial and slot.request is None:
                    slot.trial, slot.tokens = None, slot.tokens[:0]

    def close(self) -> None:
        """Ends the worker; requests in flight fail."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._worker.join()

    def _check(self, tokens: np.ndarray, experts_start: int, max_new: int) -> None:
        if not 0 < len(tokens) < self.max_len:
            raise ValueError(
                f"a stream of {len(tokens)} tokens leaves no room to sample in a context of {self.max_len}"
            )
        bad = np.flatnonzero((tokens < 0) | (tokens >= self.config.vocab_size))
        if len(bad):
            raise ValueError(
                f"token {bad[0]} has id {tokens[bad[0]]}, outside a vocabulary of {self.config.vocab_size}"
            )
        if not 0 <= experts_start < len(tokens) or max_new < 1:
            raise ValueError(f"experts_start={experts_start}, max_new={max_new} make no request")

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._waiting or self._active or self._closed)
                    if self._closed:
                        raise RuntimeError("closed")
                    batch = self._admit()
                if batch:
                    self._prefill(batch)
                if self._active:
                    self._decode()
        except BaseException as error:
            with self._wake:
                self._error = error
                for request in [*self._waiting, *self._active.values()]:
                    self._resolve(request, error)

    def _admit(self) -> list[_Request]:
        """The waiting requests to prefill now, each with its slot; empty while it pays to wait."""
        self._waiting = collections.deque(r for r in self._waiting if not r.cancelled)
        for request in self._waiting:
            request.waited += 1
        if self._active and len(self._waiting) < self._prefill_rows:
            if not self._waiting or self._waiting[0].waited < PATIENCE:
                return []
        admitted = []
        while self._waiting:
            slot = self._find_slot(self._waiting[0].trial)
            if slot is None:
                break
            request = self._waiting.popleft()
            held = self._slots[slot]
            if held.trial != request.trial:
                held.trial, held.tokens = request.trial, held.tokens[:0]
            held.request, request.slot = request, slot
            self._clock += 1
            held.used = self._clock
            self._active[slot] = request
            admitted.append(request)
        return admitted

    def _find_slot(self, trial: int) -> int | None:
        """The trial's own slot, else a free one, else the longest unused idle one, else None."""
        idle = [i for i, slot in enumerate(self._slots) if slot.request is None]
        own = [i for i in idle if self._slots[i].trial == trial]
        free = [i for i in idle if self._slots[i].trial is None]
        oldest = sorted(idle, key=lambda i: self._slots[i].used)
        return next(iter(own + free + oldest), None)

    def _prefill(self, requests: list[_Request]) -> None:
        """Reads what is new of each request's stream; the last piece yields its first sampled token."""
        pieces = []
        for request in requests:
            slot = self._slots[request.slot]
            read = len(slot.tokens)
            if not np.array_equal(slot.tokens, request.tokens[:read]) or read >= len(
                request.tokens
            ):
                self.drifted += int(np.sum(slot.tokens != request.tokens[:read])) if read else 0
                read = 0
            request.first_row = read
            pieces.append((request, read))
        while pieces:
            groups = collections.defaultdict(list)
            for request, read in pieces:
                count = min(len(request.tokens) - read, self._buckets[-1])
                bucket = next(b for b in self._buckets if b >= count)
                groups[bucket].append((request, read, count))
            pieces = []
            for bucket, group in groups.items():
                for i in range(0, len(group), self._prefill_rows):
                    self._prefill_group(bucket, group[i : i + self._prefill_rows])
                pieces += [(r, read + n) for r, read, n in group if read + n < len(r.tokens)]

    @property
    def _fixed(self) -> tuple:
        return self.config, self._sampling, self._seed, self._params

    def _prefill_group(self, bucket: int, group: list[tuple[_Request, int, int]]) -> None:
        n = self._prefill_rows
        rows = np.full(n, len(self._slots), np.int32)  # outside the cache: dropped
        tokens = np.zeros((n, bucket), np.int32)
        start, count, trial, turn = (np.zeros(n, np.int32) for _ in range(4))
        for i, (request, read, size) in enumerate(group):
            rows[i], start[i], count[i] = request.slot, read, size
            trial[i], turn[i] = request.trial, request.turn
            tokens[i, :size] = request.tokens[read : read + size]
        self._cache, out = _prefill(
            *self._fixed, self._cache, rows, start, tokens, count, trial, turn
        )
        ids, logprobs, experts = jax.device_get(out)
        for i, (request, read, size) in enumerate(group):
            request.experts.append(experts[i, :size].astype(self._dtype))
            slot = self._slots[request.slot]
            slot.tokens = request.tokens[: read + size]
            if read + size == len(request.tokens):
                self._sampled(request, int(ids[i]), logprobs[i])

    def _decode(self) -> None:
        """One more token for every active request."""
        n = len(self._slots)
        tokens, count, trial, turn = (np.zeros(n, np.int32) for _ in range(4))
        for i, request in self._active.items():
            tokens[i], count[i] = request.ids[-1], 1
            trial[i], turn[i] = request.trial, request.turn
        self._cache, out = _decode(*self._fixed, self._cache, tokens, count, trial, turn)
        ids, logprobs, experts = jax.device_get(out)
        for i, request in list(self._active.items()):
            request.experts.append(experts[i].astype(self._dtype))
            self._sampled(request, int(ids[i]), logprobs[i])

    def _sampled(self, request: _Request, token: int, logprob: float) -> None:
        """Notes one sampled token; ends the request where it stops."""
        request.ids.append(token)
        request.logprobs.append(logprob)
        total = len(request.tokens) + len(request.ids)
        finish = None
        if token in self._stop:
            finish = "stop"
        elif len(request.ids) == request.max_new or total == self.max_len:
            finish = "length"
        if finish is None and not request.cancelled:
            return
        ids = np.array(request.ids, np.int32)
        with self._wake:
            slot = self._slots[request.slot]
            slot.tokens, slot.request = np.concatenate([request.tokens, ids[:-1]]), None
            del self._active[request.slot]
        skip = request.experts_start - request.first_row
        experts = np.concatenate(request.experts)
        if skip < 0:
            error = (
                f"experts from {request.experts_start} were asked, read from {request.first_row}"
            )
            return self._resolve(request, RuntimeError(error))
        reply = Sampled(
            ids=ids,
            logprobs=np.array(request.logprobs, np.float32),
            experts=experts[skip:],
            experts_start=request.experts_start,
            finish=finish or "abort",
            version=self.version,
            seconds=time.monotonic() - request.started,
        )
        self._resolve(request, reply)

    def _resolve(self, request: _Request, value: Sampled | BaseException) -> None:
        def resolve():
            if request.future.done():
                return
            if isinstance(value, Sampled):
                request.future.set_result(value)
            else:
                request.future.set_exception(RuntimeError(f"the sampler failed: {value!r}"))

        if not request.loop.is_closed():
            request.loop.call_soon_threadsafe(resolve)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def _prefill(config, sampling, seed, params, cache, rows, start, tokens, count, trial, turn):
    """Reads a piece of each row's stream, from position `start` of its slot on."""
    cache = cache.replace(length=cache.length.at[rows].set(start, mode="drop"))
    cache, logits, experts = extend(config, params, cache, rows, tokens, count)
    return cache, (*_choose(sampling, seed, logits, trial, turn, start + count), experts)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def _decode(config, sampling, seed, params, cache, tokens, count, trial, turn):
    cache, logits, experts = extend(config, params, cache, None, tokens[:, None], count)
    return cache, (*_choose(sampling, seed, logits, trial, turn, cache.length), experts)


def _choose(sampling, seed, logits, trial, turn, position):
    uniform = uniforms(seed, trial, turn, position)
    temperature = jnp.full(len(logits), sampling.temperature)
    return sample(logits, uniform, temperature, sampling.top_p, sampling.top_k)
