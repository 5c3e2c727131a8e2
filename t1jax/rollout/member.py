"""One engine of a fleet: its process and its client, from its start to its end; and what all are asked together."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import numpy as np

from t1jax.rollout import server
from t1jax.rollout.server import Server, ServerConfig
from t1jax.rollout.sglang import Engine, EngineModel, Settings
from t1jax.types import SamplerError


class Member:
    """`alive`: it has the fleet's weights and has not failed; else `why` says what happened.

    With a `url` it is a server that others run: it is not started or ended, but waited for.
    """

    def __init__(self, index: int, log: Path, url: str | None):
        self.index, self.log, self.url = index, log, url
        self.server: Server | None = None
        self.engine: Engine | None = None
        self.alive, self.why = False, "it was never started"
        self.failures = 0  # requests that failed, in a row
        self.silences = 0  # health probes without an answer, in a row
        self.trials: set[int] = set()

    def check(self) -> bool:
        """`alive`, after a look at the process."""
        if self.alive and (cause := server.ended(self.server)):
            self.alive, self.why = False, cause
        return self.alive

    async def start(
        self, config: ServerConfig, checkpoint: Path, model: EngineModel, settings: Settings
    ) -> None:
        """A new process in place of the last one. Raises SamplerError where it does not come up."""
        await self.close()
        if self.url:
            self.server = server.found(self.url)
        else:
            self.server = server.start(config, checkpoint, self.log, self.index)
        self.engine = Engine(self.server.url, model, settings)
        if self.url:
            await self.engine.abandon_update()
        await server.wait_ready(self.server, config.start_timeout_s)
        await self.engine.inspect()

    async def settles(self, timeout_s: float) -> bool:
        """Whether it is alive, its server ends all requests in time, and generates, if it has failed to."""
        if not self.check():
            return False
        try:
            await self.engine.drain(timeout_s)
            if self.failures:
                await self.engine.logprobs(np.zeros(1, np.int32))
        except SamplerError:
            return False
        return True

    async def prove(self, tokens: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
        """Makes it alive, or raises SamplerError where its log-probs of `tokens` i32[N] are not the
        `expected` f32[N-1]."""
        found = await self.engine.logprobs(tokens)
        gap = np.abs(found - expected).max() if found.shape == expected.shape else np.inf
        if not gap <= tolerance:
            raise SamplerError(f"its log-probs of a probe are {gap:.2g} nats off")
        self.alive, self.failures, self.silences = True, 0, 0

    async def probe(self, timeout_s: float, allowed: int) -> None:
        """A health probe; the `allowed`-th in a row without an answer ends the process.

        So its requests fail at once, and nothing of it holds memory or a core.
        """
        healthy = self.check() and await self.engine.healthy(timeout_s)
        if not self.alive:
            return
        self.silences = 0 if healthy else self.silences + 1
        if self.silences >= allowed:
            self.alive, self.why = (
                False,
                f"{allowed} health probes got no answer in {timeout_s:g} s",
            )
            await self.kill()

    async def kill(self) -> None:
        """Ends the process at once, or the client of one that others run. Its requests fail."""
        self.alive = False
        if self.server:
            await asyncio.to_thread(server.stop, self.server, 0.0)
        if self.url and self.engine:
            await self.engine.close()

    async def close(self) -> None:
        """Ends process and client, while no request is in flight."""
        self.alive = False
        if self.server:
            await asyncio.to_thread(server.stop, self.server)
        if self.engine:
            await self.engine.close()
        self.server = self.engine = None


async def each(
    members: Iterable[Member],
    failed: dict[Member, SamplerError],
    work: Callable[[Member], Awaitable[None]],
) -> None:
    """`work` on all members together but those that have failed; notes which do."""
    members = [m for m in members if m not in failed]
    results = await asyncio.gather(*map(work, members), return_exceptions=True)
    for member, error in zip(members, results, strict=True):
        if isinstance(error, SamplerError):
            failed[member] = error
        elif error is not None:
            raise error
