"""How fast things may start: trials on a fleet, containers on a Docker host."""

import asyncio
import time
from collections.abc import Callable


class TokenBucket:
    """Admits `rate` events a second on average, at most `burst` at once. Belongs to no event loop."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic):
        self._rate, self._burst, self._clock = rate, burst, clock
        self._level, self._last = float(burst), clock()  # below 0: how many wait

    async def take(self) -> None:
        """Returns when the event may happen, first come, first served."""
        wait = self.wait()
        self._level -= 1
        try:
            await asyncio.sleep(wait)
        except asyncio.CancelledError:
            self._level += 1
            raise

    def wait(self) -> float:
        """Seconds until one more event may happen."""
        now = self._clock()
        self._level = min(self._burst, self._level + (now - self._last) * self._rate)
        self._last = now
        return max(0.0, (1 - self._level) / self._rate)
