"""Several SGLang engines as one sampler: placement, health, restarts, one version of weights.

A trial stays with one engine, whose prefix cache serves its next turn; a new trial goes to the engine with the
fewest, but never to one that fails while another does not: who fails at once would always have the fewest. The
fleet talks to the engines directly: the public router drops routed experts without a word and answers 404 to every
call that concerns weights.

`load` is the only barrier, and no request spans it: dead engines are restarted, every engine gets the weights,
reports their version and repeats the trainer's log-probs of a probe, or the whole load fails and the fleet
serves nothing. So no reply is ever of other weights than the last ones published. An engine that dies in
between is not restarted before the next load: a start takes longer than a trial may wait.

The fleet lives on a thread with an event loop of its own, as collectors come and go with theirs.
"""

import asyncio
import concurrent.futures
import dataclasses
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from t1jax.admission import TokenBucket
from t1jax.rollout.member import Member, each
from t1jax.rollout.server import ServerConfig
from t1jax.rollout.sglang import EngineModel, Settings, update_body
from t1jax.rollout.tensors import Tensor, buckets, pack
from t1jax.types import Sampled, SamplerError, Sampling

Export = Callable[[Any, Path], None]  # writes params as a Hugging Face folder
Tensors = Callable[[Any], Iterable[Tensor]]  # what that folder would hold, float32 or bfloat16
Probe = Callable[[Any, np.ndarray], np.ndarray]  # log-probs f32[N-1] of tokens 1.. at temperature 1
PROBE_TOKENS = 32
URL = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[\w.-]+):\d{1,5}")
CLOSED = "the fleet is closed"


@dataclasses.dataclass(frozen=True)
class FleetConfig:
    """How many servers of what kind, how they get weights, and how their health is watched.

    transfer: "disk" writes a folder that every engine reads (on other machines under the same path); "tensors"
    sends them to running engines, and writes the folder only for engines that must be started here.

    Raises ValueError for a number that is not positive, and for urls that are none, or there twice.
    """

    server: ServerConfig
    engines: int
    urls: str  # of servers that run already, in place of `engines` started here: "http://HOST:PORT ..."
    transfer: Literal["disk", "tensors"]
    bucket_bytes: int  # of tensors in one request
    reply_timeout_s: float
    control_timeout_s: float  # of a call that is neither for a reply nor for weights
    load_timeout_s: float  # of a call that changes weights: minutes for a large model
    probe_period_s: float
    probe_timeout_s: float
    probe_failures: int  # in a row, after which an engine is ended
    starts_per_s: float  # trials admitted, all engines together
    burst: int  # trials that may start at once
    probe_tolerance: float  # nats between the trainer's log-probs and an engine's, after a load

    def __post_init__(self):
        for name in (
            *("bucket_bytes", "reply_timeout_s", "control_timeout_s", "load_timeout_s"),
            *("probe_period_s", "probe_timeout_s", "probe_failures", "probe_tolerance"),
            *("starts_per_s", "burst"),
        ):
            if not (value := getattr(self, name)) > 0:
                raise ValueError(f"{name}={value} must be positive")
        urls = [url.rstrip("/") for url in self.urls.split()]
        for url in urls:
            if not URL.fullmatch(url):
                raise ValueError(f"urls: {url!r} is not http://HOST:PORT")
            if urls.count(url) > 1:
                raise ValueError(f"urls: {url} is there twice")

    @property
    def count(self) -> int:
        """Engines."""
        return len(self.urls.split()) or self.engines


class Fleet:
    """A Sampler (see types.py) of several engines. `version` is -1 until the first `load`, and after a failed one."""

    def __init__(
        self,
        config: FleetConfig,
        model: EngineModel,
        settings: Settings,
        sampling: Sampling,
        export: Export,
        tensors: Tensors,
        probe: Probe,
        folder: Path,
    ):
        """folder: for weights on their way and for logs; a tmpfs is fastest. Raises SamplerError where it
        cannot be written to."""
        self._config, self._model, self._settings = config, model, settings
        self._export, self._tensors, self._probe = export, tensors, probe
        self._folder = Path(folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self._folder).close()
        except OSError as error:
            raise SamplerError(
                f"the engines' folder {folder} cannot be written to: {error.strerror}"
            ) from None
        self.version = -1
        self.sampling = sampling
        self.rewritten = 0  # ids of earlier turns that a caller's stream did not repeat
        self._streams: dict[int, np.ndarray] = {}
        urls = config.urls.split() or [None] * config.engines
        logs = (self._folder / f"engine-{i}.log" for i in range(len(urls)))
        self._members = [
            Member(i, log, url) for i, (log, url) in enumerate(zip(logs, urls, strict=True))
        ]
        self._home: dict[int, Member] = {}
        self._requests: set[asyncio.Task] = set()
        self._admission = TokenBucket(config.starts_per_s, config.burst)
        self._loop, self._closed = asyncio.new_event_loop(), False
        self._thread = threading.Thread(target=self._serve, name="fleet", daemon=True)
        self._thread.start()
        self._watch = self._submit(self._watch_health())

    async def admit(self) -> None:
        """See types.Sampler: `starts_per_s` trials a second, `burst` at once."""
        await asyncio.wrap_future(self._submit(self._admission.take()))

    async def sample(
        self, trial: int, turn: int, tokens: np.ndarray, experts_start: int, max_new: int
    ) -> Sampled:
        """See types.Sampler. Raises SamplerError where the trial's engine is dead: the trial is lost."""
        before = self._streams.get(trial, tokens[:0])
        kept = before[: len(tokens)] == tokens[: len(before)]
        self.rewritten += len(before) - int(np.argmin(np.append(kept, False)))
        work = self._sample(trial, tokens, experts_start, max_new)
        reply = await asyncio.wrap_future(self._submit(work))
        self._streams[trial] = np.concatenate([tokens, reply.ids])
        return reply

    async def release(self, trial: int) -> None:
        self._streams.pop(trial, None)
        if not self._closed:
            self._loop.call_soon_threadsafe(self._forget, trial)

    def load(self, params: Any, version: int) -> None:
        """Publishes weights to every engine; see the top. Raises SamplerError where one does not follow."""
        if self._watch.done():
            self._watch.result()  # it ends with the fleet, or by a fault of its own
        self._submit(self._load(params, version)).result()

    def warm_up(self) -> None:
        """Nothing to compile: engines are warm once they are ready."""

    def close(self) -> None:
        """Stops every engine; requests in flight fail. Idempotent."""
        if not self._closed:
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        """The fleet's thread. When it ends, for whatever reason, engines and requests do, too: nobody waits
        for a reply that does not come."""
        try:
            self._loop.run_forever()
        finally:
            self._closed = True
            self._loop.run_until_complete(self._end())
            self._loop.close()

    async def _end(self) -> None:
        work = asyncio.all_tasks() - {asyncio.current_task()}
        for task in work:
            task.cancel()
        await asyncio.gather(*(m.kill() for m in self._members))
        await asyncio.gather(*work, return_exceptions=True)
        await asyncio.gather(*(m.close() for m in self._members))

    def _submit(self, work: Coroutine) -> concurrent.futures.Future:
        if self._closed:
            work.close()
            raise SamplerError(CLOSED)
        return asyncio.run_coroutine_threadsafe(self._until_closed(work), self._loop)

    async def _until_closed(self, work: Coroutine) -> Any:
        """`work`, or SamplerError where the fleet ends first. An error that nobody waits for is not told."""
        asyncio.current_task().add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            return await work
        except asyncio.CancelledError:
            if self._closed:
                raise SamplerError(CLOSED) from None
            raise

    async def _sample(self, trial, tokens, experts_start, max_new) -> Sampled:
        request = asyncio.current_task()
        self._requests.add(request)
        try:
            return await self._ask(trial, tokens, experts_start, max_new)
        except asyncio.CancelledError:
            self._forget(trial)  # its release may have come before it was placed
            raise
        finally:
            self._requests.discard(request)

    async def _ask(self, trial, tokens, experts_start, max_new) -> Sampled:
        if self.version < 0:
            raise SamplerError("the fleet has no weights: a load is missing or has failed")
        member = self._home.get(trial) or self._place(trial)
        if member.check():
            try:
                reply = await member.engine.generate(
                    tokens, experts_start, max_new, self.sampling, self.version
                )
                member.failures = 0
                return reply
            except SamplerError:
                member.failures += 1
                if member.check():
                    raise
        raise SamplerError(f"engine {member.index} died under trial {trial}: {member.why}")

    def _place(self, trial: int) -> Member:
        """Gives a new trial to the living engine with the fewest failures, then trials."""
        alive = [m for m in self._members if m.check()]
        if not alive:
            causes = "; ".join(f"engine {m.index}: {m.why}" for m in self._members)
            raise SamplerError(f"no engine is alive ({causes})")
        member = min(alive, key=lambda m: (m.failures, len(m.trials)))
        member.trials.add(trial)
        self._home[trial] = member
        return member

    def _forget(self, trial: int) -> None:
        member = self._home.pop(trial, None)
        if member:
            member.trials.discard(trial)

    async def _load(self, params, version: int) -> None:
        if any(not request.cancelling() for request in self._requests):
            raise RuntimeError("weights can be loaded only while no request is in flight")
        await asyncio.gather(*self._requests, return_exceptions=True)  # their callers have gone
        self.version = -1
        c = self._config
        well = await asyncio.gather(*(m.settles(c.probe_timeout_s) for m in self._members))
        running = [m for m, settled in zip(self._members, well, strict=True) if settled]
        others = [m for m in self._members if m not in running]
        for member in self._members:  # until it has proved that it has the weights
            member.alive, member.why = False, f"its load of weights {version} was broken off"
        failed: dict[Member, SamplerError] = {}
        tokens = np.random.default_rng(version).integers(0, self._model.vocab_size, PROBE_TOKENS)
        tokens = tokens.astype(np.int32)
        expected = await asyncio.to_thread(self._probe, params, tokens)
        checkpoint = self._folder / f"weights-{version}"

        async def start(member: Member) -> None:
            await member.start(c.server, checkpoint, self._model, self._settings)

        async def read(member: Member) -> None:
            if member in others:
                await start(member)
            await member.engine.load(checkpoint, version, c.load_timeout_s)

        async def prove(member: Member) -> None:
            await member.prove(tokens, expected, c.probe_tolerance)

        if c.urls.split():  # they need no files to start
            await each(others, failed, start)
            running, others = self._members, []
        if c.transfer == "tensors":
            await self._send(running, params, version, failed)
            readers = others
        else:
            readers = self._members
        try:
            if readers:
                await self._write(params, checkpoint)
            await each(readers, failed, read)
            await each(self._members, failed, prove)
        finally:
            shutil.rmtree(checkpoint, ignore_errors=True)
        for member, error in failed.items():
            member.alive, member.why = False, str(error)
        if failed:
            member, error = next(iter(failed.items()))
            raise SamplerError(
                f"{len(failed)} of {len(self._members)} engines did not take weights {version}; "
                f"engine {member.index}: {error}"
            )
        self.version = version

    async def _write(self, params, checkpoint: Path) -> None:
        for left in self._folder.glob("*weights-*"):  # by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        try:
            await asyncio.to_thread(self._export, params, checkpoint)
        except OSError as error:
            raise SamplerError(
                f"the weights cannot be written to {checkpoint}: {error.strerror}"
            ) from None

    async def _send(self, members, params, version: int, failed) -> None:
        """Sends tensors to running engines, a bucket to all of them before the next is made."""
        wait = self._config.load_timeout_s
        await each(members, failed, lambda m: m.engine.begin_update(wait))
        ranks = {m.engine.ranks for m in members if m not in failed}

        def make() -> Iterator[dict[int, bytes]]:
            """Bodies by an engine's ranks, each made once and not on the loop: they are large."""
            for bucket in buckets(self._tensors(params), self._config.bucket_bytes):
                payload = pack(bucket)
                yield {n: update_body(payload, n, version) for n in ranks}

        source = make()
        while len(failed) < len(members):
            bodies = await asyncio.to_thread(next, source, None)
            if bodies is None:
                break
            await each(
                members, failed, lambda m, b=bodies: m.engine.update(b[m.engine.ranks], wait)
            )
        await each(members, failed, lambda m: m.engine.end_update(version, wait))

    async def _watch_health(self) -> None:
        """Ends engines that do not answer; `load` brings them back."""
        c = self._config
        while True:
            await asyncio.sleep(c.probe_period_s)
            alive = [m for m in self._members if m.check()]
            await asyncio.gather(*(m.probe(c.probe_timeout_s, c.probe_failures) for m in alive))
