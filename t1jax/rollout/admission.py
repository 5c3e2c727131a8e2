"""How fast trials may start."""

import asyncio
import time
from collections.abc import Callable


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
