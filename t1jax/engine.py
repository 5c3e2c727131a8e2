"""JaxSampler: the embedded sampler. Continuous batching over cache slots, same Protocol as a remote engine.

Every device call has one of a few fixed shapes, and a row's result does not depend on the other rows.
With randomness keyed by (seed, trial, turn, position) a reply is therefore the same bit for bit whoever
shares its batch and in whatever order requests arrive.
"""

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from t1jax.model.config import ModelConfig
from t1jax.model.decode import extend, init_cache, sample, uniforms
from t1jax.slots import Request, Slot, SlotTable
from t1jax.types import Sampled, SamplerError, Sampling, digest

ROWS = 8  # device shapes are multiples of this, so that a row's bits do not depend on its place
PATIENCE = 8  # decode steps a prompt waits for others to fill a prefill call


class JaxSampler:
    """Implements types.Sampler. One worker thread owns the device; call `load` before the first sample.

    Up to `slots` trials of at most `max_len` tokens are served at a time and stay cached between their
    turns; further ones wait for a release, oldest first. Prompts are read in calls of [prefill_rows,
    bucket], long ones in several.
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
        # A matrix product treats a last, partial group of rows in another way: shapes have whole groups.
        self._slots, self._prefill_rows = -(-slots // ROWS) * ROWS, -(-prefill_rows // ROWS) * ROWS
        self._stop = frozenset(stop_ids)
        self.sampling = sampling
        self._seed, self._buckets = np.uint32(seed), tuple(prefill_buckets)
        self._device = jax.devices()[0]  # of those a trainer may use, one
        self._cache = jax.device_put(init_cache(config, self._slots, max_len), self._device)
        self._params: dict | None = None
        self._table = SlotTable(slots, prefill_rows, prefill_buckets, PATIENCE)
        self._ended: BaseException | None = None  # why no more is served
        self._lock = threading.Condition()  # of the table and of `_ended`
        self._worker = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._worker.start()

    @property
    def rewritten(self) -> int:
        """Cached tokens that a caller's stream did not repeat, so far: 0 where token ids are kept (TITO)."""
        return self._table.rewritten

    def load(self, params: dict, version: int) -> None:
        """Publishes weights; all that is cached is forgotten.

        Raises RuntimeError while requests are in flight, as none may span two versions; cancelled ones
        are waited for.
        """
        params = jax.device_put(params, self._device)
        with self._lock:
            self._check_serving()
            if any(not request.cancelled for request in self._table.requests()):
                raise RuntimeError("weights can be loaded only while no request is in flight")
            self._lock.wait_for(lambda: self._ended or not self._table.requests())
            self._check_serving()
            self._table.release_all()
            self._params, self.version = params, version

    def warm_up(self) -> None:
        """Compiles every shape, so that no trial's time pays for it. Call it after the first `load`."""
        with self._lock:
            self._check_serving()
            n = self._prefill_rows
            nowhere, nothing = np.full(n, self._slots, np.int32), np.zeros(n, np.int32)
            for bucket in self._buckets:
                tokens = np.zeros((n, bucket), np.int32)
                self._call(prefill, nowhere, nothing, tokens, nothing, nothing, nothing)
            self._call(decode, *np.zeros((4, self._slots), np.int32))

    async def sample(
        self, trial: int, turn: int, tokens: np.ndarray, experts_start: int, max_new: int
    ) -> Sampled:
        """See types.Sampler. Raises RuntimeError without weights and once the sampler has ended.

        Cancelling it ends the work at the next step and frees the trial's slot.
        """
        tokens = self._check(trial, turn, tokens, experts_start, max_new)
        future = asyncio.get_running_loop().create_future()
        request = Request(trial, turn, tokens, experts_start, max_new, future, time.monotonic())
        with self._lock:
            self._check_serving()
            if self._params is None:
                raise RuntimeError("no weights are loaded")
            if any(r.trial == trial and not r.cancelled for r in self._table.requests()):
                raise ValueError(f"trial {trial} already has a request in flight")
            self._table.waiting.append(request)
            self._lock.notify_all()
        try:
            return await future
        except asyncio.CancelledError:
            with self._lock:
                request.cancelled = True
                self._lock.notify_all()
            raise

    async def admit(self) -> None:
        """At once: there is a slot for every trial."""

    async def release(self, trial: int) -> None:
        """Frees the trial's slot."""
        with self._lock:
            self._table.release(trial)
            self._lock.notify_all()

    def close(self) -> None:
        """Ends the worker; requests in flight fail. Idempotent."""
        with self._lock:
            self._ended = self._ended or RuntimeError("it was closed")
            self._lock.notify_all()
        self._worker.join()

    def _check(self, trial, turn, tokens, experts_start, max_new) -> np.ndarray:
        tokens, vocabulary = np.asarray(tokens), self.config.vocab_size
        if tokens.ndim != 1 or not 0 < len(tokens) < self.max_len:
            raise ValueError(
                f"trial {trial}: cannot continue a stream of shape {tokens.shape}, "
                f"1 to {self.max_len - 1} tokens leave room in the context"
            )
        bad = np.flatnonzero((tokens < 0) | (tokens >= vocabulary))
        if len(bad):
            raise ValueError(
                f"trial {trial}: token {bad[0]} has id {tokens[bad[0]]}, "
                f"outside a vocabulary of {vocabulary}"
            )
        if not 0 <= experts_start < len(tokens) or max_new < 1:
            raise ValueError(
                f"trial {trial}: experts_start={experts_start} must lie below {len(tokens)} tokens, "
                f"and max_new={max_new} must be positive"
            )
        if not (0 <= trial < 2**31 and 0 <= turn < 2**31):
            raise ValueError(f"trial {trial}, turn {turn}: both are numbers below 2^31")
        return tokens.astype(np.int32)

    def _check_serving(self) -> None:
        if self._ended is not None:
            raise SamplerError(f"the sampler has ended: {self._ended}")

    def _run(self) -> None:
        """The worker: new prompts as they come, then one more token for everybody."""
        try:
            while self._wait_for_work():
                hurry = not self._table.decoding
                while group := self._table.next_group(hurry):
                    self._prefill(group)
                if self._table.decoding:
                    self._decode()
        except BaseException as error:  # whatever it is, nobody may wait for ever
            self._ended = error
        with self._lock:
            failure = SamplerError(f"the sampler has ended: {self._ended}")
            failure.__cause__ = self._ended
            for request in self._table.requests():
                _settle(request.future, failure)
            self._lock.notify_all()

    def _wait_for_work(self) -> bool:
        """Hands out slots; False where the sampler is to end."""
        with self._lock:
            while self._ended is None:
                self._table.admit()
                self._lock.notify_all()
                if self._table.reading or self._table.decoding:
                    return True
                self._lock.wait()
            return False

    def _prefill(self, group: list[Slot]) -> None:
        """Reads the next piece of each stream; the last piece yields the reply's first token."""
        n, bucket = self._prefill_rows, self._table.bucket(group[0])
        tokens, rows = np.zeros((n, bucket), np.int32), np.full(n, self._slots, np.int32)
        start, count, trial, turn = np.zeros((4, n), np.int32)
        for i, slot in enumerate(group):
            piece = slot.piece[:bucket]
            tokens[i, : len(piece)] = piece
            rows[i], start[i], count[i] = slot.index, slot.read, len(piece)
            trial[i], turn[i] = slot.request.trial, slot.request.turn
        ids, logprobs, experts = self._call(prefill, rows, start, tokens, count, trial, turn)
        for i, slot in enumerate(group):
            slot.request.experts.append(experts[i, : count[i]])
            slot.tokens = slot.request.tokens[: start[i] + count[i]]
            if not len(slot.piece):
                with self._lock:
                    self._table.start_decoding(slot)
                self._take(slot, int(ids[i]), float(logprobs[i]))

    def _decode(self) -> None:
        """Reads each reply's last token and samples the next one."""
        tokens, count, trial, turn = np.zeros((4, self._slots), np.int32)
        for slot in self._table.decoding:
            i, request = slot.index, slot.request
            tokens[i], count[i], trial[i], turn[i] = request.ids[-1], 1, request.trial, request.turn
        ids, logprobs, experts = self._call(decode, tokens, count, trial, turn)
        for slot in self._table.reading:
            slot.request.waited += 1
        for slot in list(self._table.decoding):
            slot.request.experts.append(experts[slot.index])
            self._take(slot, int(ids[slot.index]), float(logprobs[slot.index]))

    def _call(self, function, *arguments) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        drawn = self.sampling.top_p, self.sampling.top_k, np.float32(self.sampling.temperature)
        self._cache, out = function(
            self.config, *drawn, self._seed, self._params, self._cache, *arguments
        )
        return jax.device_get(out)

    def _take(self, slot: Slot, token: int, logprob: float) -> None:
        """Adds a token to the reply, and delivers that where it ends."""
        request = slot.request
        request.ids.append(token)
        request.logprobs.append(logprob)
        full = len(request.tokens) + len(request.ids) == self.max_len
        if token in self._stop:
            finish = "stop"
        elif full or len(request.ids) == request.max_new:
            finish = "length"
        else:
            return
        ids = np.array(request.ids, np.int32)
        reply = Sampled(
            ids=ids,
            logprobs=np.array(request.logprobs, np.float32),
            experts=np.concatenate(request.experts)[request.experts_start - request.first_row :],
            experts_start=request.experts_start,
            finish=finish,
            version=self.version,
            seconds=time.monotonic() - request.started,
            digest=digest(ids),
        )
        with self._lock:
            slot.tokens = np.concatenate([request.tokens, ids[:-1]])  # the last was not read yet
            self._table.leave(slot)
        _settle(request.future, reply)


def _settle(future: asyncio.Future, value: Sampled | Exception) -> None:
    """Resolves a future from the worker's thread; nothing happens where nobody awaits it any more."""

    def settle():
        if future.done():
            return
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value)

    with contextlib.suppress(RuntimeError):  # its loop is closed
        future.get_loop().call_soon_threadsafe(settle)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=6)
def prefill(
    config, top_p, top_k, temperature, seed, params, cache, rows, start, tokens, count, trial, turn
):
    """Reads a piece of each row's stream from position `start` on; see `_choose` for what is returned."""
    cache = cache.replace(length=cache.length.at[rows].set(start, mode="drop"))
    cache, logits_RV, experts = extend(config, params, cache, rows, tokens, count)
    uniform_R = uniforms(seed, trial, turn, start + count)
    return cache, _choose(config, top_p, top_k, temperature, logits_RV, uniform_R, experts)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=6)
def decode(config, top_p, top_k, temperature, seed, params, cache, tokens, count, trial, turn):
    """Reads one token in each slot with count 1."""
    cache, logits_RV, experts = extend(config, params, cache, None, tokens[:, None], count)
    uniform_R = uniforms(seed, trial, turn, cache.length)
    return cache, _choose(config, top_p, top_k, temperature, logits_RV, uniform_R, experts)


def _choose(config, top_p, top_k, temperature, logits_RV, uniform_R, experts_RSLK):
    """ids i32[R], their logprobs f32[R], and the experts as the host keeps them, u8 or u16."""
    temperature_R = jnp.full(len(logits_RV), temperature)
    ids_R, logp_R = sample(logits_RV, uniform_R, temperature_R, top_p, top_k)
    dtype = jnp.uint8 if config.num_experts <= 256 else jnp.uint16
    return ids_R, logp_R, experts_RSLK.astype(dtype)
