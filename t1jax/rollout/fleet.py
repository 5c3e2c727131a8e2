"""Several SGLang engines as one sampler: placement, health, restarts, one version of weights.

A trial stays with one engine, whose prefix cache serves its next turn; a new trial goes to the engine with the
fewest. The fleet talks to the engines directly: the public router drops routed experts without a word and
answers 404 to every call that concerns weights.

`load` is the only barrier, and no request spans it: dead engines are restarted, every engine gets the weights,
reports their version and repeats the trainer's log-probs of a probe, or the whole load fails and the fleet
serves nothing. So no reply is ever of other weights than the last ones published.

The fleet lives on a thread with an event loop of its own, as collectors come and go with theirs.
"""

import asyncio
import dataclasses
import shutil
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np

from t1jax.rollout import server
from t1jax.rollout.server import Server, ServerConfig
from t1jax.rollout.sglang import Engine, EngineModel, Settings, check_stream
from t1jax.types import Sampled, SamplerError

Export = Callable[[Any, Path], None]  # writes params as a Hugging Face folder
Probe = Callable[[Any, np.ndarray], np.ndarray]  # log-probs f32[N-1] of tokens 1.. at temperature 1


@dataclasses.dataclass(frozen=True)
class FleetConfig:
    """How many servers of what kind, and how their health is watched."""

    server: ServerConfig
    engines: int
    reply_timeout_s: float
    control_timeout_s: float  # of a call that concerns health or weights
    probe_period_s: float
    probe_timeout_s: float
    probe_failures: int  # in a row, after which an engine counts as dead
    starts_per_s: float  # trials admitted, all engines together
    burst: int  # trials that may start at once
    probe_tolerance: float  # nats between the trainer's log-probs and an engine's, after a load


@dataclasses.dataclass
class _Member:
    """One engine: its process and client; `alive` False until weights are loaded and once it has failed."""

    index: int
    server: Server | None = None
    engine: Engine | None = None
    alive: bool = False
    failures: int = 0
    trials: set[int] = dataclasses.field(default_factory=set)


class Fleet:
    """A Sampler (see types.py) of several engines. `version` is -1 until the first `load`, and after a failed one."""

    def __init__(
        self,
        config: FleetConfig,
        model: EngineModel,
        settings: Settings,
        export: Export,
        probe: Probe,
        folder: Path,
    ):
        """folder: for weights on their way and for logs; a tmpfs is fastest."""
        self._config, self._model, self._settings = config, model, settings
        self._export, self._probe, self._folder = export, probe, Path(folder)
        self.version = -1
        self.drifted = 0  # ids of earlier turns that a caller's stream did not repeat: 0 under TITO
        self._streams: dict[int, np.ndarray] = {}
        self._members = [_Member(i) for i in range(config.engines)]
        self._home: dict[int, _Member] = {}
        self._in_flight = 0
        self._admission = TokenBucket(config.starts_per_s, config.burst)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fleet", daemon=True)
        self._thread.start()
        self._watch = asyncio.run_coroutine_threadsafe(self._watch_health(), self._loop)

    async def sample(
        self, trial: int, turn: int, tokens: np.ndarray, experts_start: int, max_new: int
    ) -> Sampled:
        """See types.Sampler. Raises SamplerError where the trial's engine is dead: the trial is lost."""
        check_stream(tokens, experts_start, max_new, self._model)
        before = self._streams.get(trial, tokens[:0])
        kept = before[: len(tokens)] == tokens[: len(before)]
        self.drifted += len(before) - int(np.argmin(np.append(kept, False)))
        work = self._sample(trial, tokens, experts_start, max_new)
        reply = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        self._streams[trial] = np.concatenate([tokens, reply.ids])
        return reply

    async def release(self, trial: int) -> None:
        self._streams.pop(trial, None)
        self._loop.call_soon_threadsafe(self._forget, trial)

    def load(self, params: Any, version: int) -> None:
        """Publishes weights to every engine; see the top. Raises SamplerError where one does not follow."""
        self._run(self._load(params, version))

    def warm_up(self) -> None:
        """Nothing to compile: engines are warm once they are ready."""

    def close(self) -> None:
        """Stops every engine. Idempotent."""
        if self._loop.is_closed():
            return
        self._watch.cancel()
        self._run(self._stop_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _sample(self, trial, tokens, experts_start, max_new) -> Sampled:
        if self.version < 0:
            raise SamplerError("the fleet has no weights: a load is missing or has failed")
        if trial not in self._home:
            await self._admission.take()
        member = self._home.get(trial) or self._place(trial)
        if not member.alive:
            raise SamplerError(f"engine {member.index} has died under trial {trial}")
        self._in_flight += 1
        try:
            return await member.engine.generate(tokens, experts_start, max_new, self.version)
        except SamplerError:
            if member.server.process.poll() is not None:
                member.alive = False
            raise
        finally:
            self._in_flight -= 1

    def _place(self, trial: int) -> _Member:
        """Gives a new trial to the living engine with the fewest trials."""
        alive = [m for m in self._members if m.alive]
        if not alive:
            raise SamplerError("every engine is dead")
        member = min(alive, key=lambda m: len(m.trials))
        member.trials.add(trial)
        self._home[trial] = member
        return member

    def _forget(self, trial: int) -> None:
        member = self._home.pop(trial, None)
        if member:
            member.trials.discard(trial)

    async def _load(self, params, version: int) -> None:
        if self._in_flight:
            raise RuntimeError("weights can be loaded only while no request is in flight")
        self.version = -1
        checkpoint = self._folder / f"weights-{version}"
        shutil.rmtree(checkpoint, ignore_errors=True)
        await asyncio.to_thread(self._export, params, checkpoint)
        try:
            tokens = np.random.default_rng(version).integers(0, self._model.vocab_size, 32)
            tokens = tokens.astype(np.int32)
            expected = await asyncio.to_thread(self._probe, params, tokens)
            follow = (self._follow(m, checkpoint, version, tokens, expected) for m in self._members)
            results = await asyncio.gather(*follow, return_exceptions=True)
        finally:
            shutil.rmtree(checkpoint, ignore_errors=True)
        failed = [(m, e) for m, e in zip(self._members, results, strict=True) if e is not None]
        if failed:
            member, error = failed[0]
            if not isinstance(error, SamplerError):
                raise error
            raise SamplerError(
                f"{len(failed)} of {len(results)} engines did not take weights {version}; "
                f"engine {member.index}: {error}"
            )
        self.version = version

    async def _follow(self, member: _Member, checkpoint, version, tokens, expected) -> None:
        """Brings one engine to the weights, restarting it if need be, and proves that it has them."""
        if not member.alive:
            await self._restart(member, checkpoint)
        member.alive = False
        await member.engine.load(checkpoint, version)
        found = await member.engine.logprobs(tokens)
        gap = np.abs(found - expected).max() if found.shape == expected.shape else np.inf
        if not gap <= self._config.probe_tolerance:
            raise SamplerError(f"its log-probs of a probe are {gap:.2g} nats off")
        member.alive, member.failures = True, 0

    async def _restart(self, member: _Member, checkpoint: Path) -> None:
        await self._stop(member)
        log = self._folder / f"engine-{member.index}.log"
        member.server = server.start(self._config.server, checkpoint, log, member.index)
        await server.wait_ready(member.server, self._config.server.start_timeout_s)
        member.engine = Engine(member.server.url, self._model, self._settings)

    async def _stop(self, member: _Member) -> None:
        member.alive = False
        if member.engine:
            await member.engine.close()
        if member.server:
            await asyncio.to_thread(server.stop, member.server)
        member.engine = member.server = None

    async def _stop_all(self) -> None:
        await asyncio.gather(*map(self._stop, self._members))

    async def _watch_health(self) -> None:
        """Marks engines as dead that ended or do not answer; `load` brings them back."""
        while True:
            await asyncio.sleep(self._config.probe_period_s)
            for member in [m for m in self._members if m.alive]:
                ended = member.server.process.poll() is not None
                healthy = not ended and await member.engine.healthy(self._config.probe_timeout_s)
                member.failures = 0 if healthy else member.failures + 1
                if ended or member.failures >= self._config.probe_failures:
                    member.alive = False


class TokenBucket:
    """Admits `rate` events a second on average, at most `burst` at once."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic):
        self._rate, self._burst, self._clock = rate, burst, clock
        self._level, self._last = float(burst), clock()
        self._lock = asyncio.Lock()

    async def take(self) -> None:
        """Returns when the event may happen, first come, first served."""
        async with self._lock:
            while (wait := self.wait()) > 0:
                await asyncio.sleep(wait)
            self._level -= 1

    def wait(self) -> float:
        """Seconds until the next event may happen."""
        now = self._clock()
        self._level = min(self._burst, self._level + (now - self._last) * self._rate)
        self._last = now
        return max(0.0, (1 - self._level) / self._rate)
