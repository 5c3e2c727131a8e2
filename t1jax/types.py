"""Host nouns: what a task, a turn and a trajectory are, and the Protocols of samplers.

That of sandboxes is in sandbox/protocol.py.

Row t of every per-token array belongs to token t: `sampled[t]` says that the policy chose token t,
`logprobs[t]` is log p(token t | tokens before it), `experts[t]` are the experts used while token t was
*read* (so they predict token t+1). The stream's last token is never read, hence N-1 rows of experts.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np


@dataclasses.dataclass(frozen=True)
class Task:
    """A Harbor task folder (see agent/task.py). Times in seconds, sizes in MiB."""

    name: str
    path: Path
    instruction: str
    environment: Path
    tests: Path
    solution: Path | None
    workdir: str | None
    agent_timeout_s: float
    verifier_timeout_s: float
    live_processes: bool  # the tests talk to what the agent left running
    build_timeout_s: float
    docker_image: str | None
    cpus: float
    memory_mb: int
    storage_mb: int
    network: Literal["public", "no-network", "allowlist"]
    env: Mapping[str, str]
    verifier_env: Mapping[str, str]
    solution_env: Mapping[str, str]
    metadata: Mapping[str, object]
    unknown_keys: tuple[str, ...]

    @property
    def family(self) -> str:
        """The kind of task: metadata.family, else the task's own name."""
        return str(self.metadata.get("family", self.name))


@dataclasses.dataclass(frozen=True)
class ExecResult:
    """What one command left behind. `output` holds stdout and stderr, bounded and decoded."""

    exit_code: int
    output: str
    seconds: float
    timed_out: bool


@dataclasses.dataclass(frozen=True)
class Sampled:
    """One reply of a sampler.

    ids i32[S], logprobs f32[S] (of the sampled ids, after temperature), experts u8|u16[R, L, K]: the rows
    [experts_start, N-1) of the whole stream, N = context + S. finish "length" means cut by max_new.
    `digest` is digest(ids), taken where the sampler makes this record: what becomes of the ids later, it stays.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    experts: np.ndarray
    experts_start: int
    finish: Literal["stop", "length", "abort"]
    version: int
    seconds: float
    digest: str


def digest(ids: np.ndarray) -> str:
    """16 hexadecimal digits that tell whether ids i32[S] are still those a sampler returned."""
    data = np.ascontiguousarray(ids, "<i4").tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


# How a turn continues the one before it; "split" begins a chunk. See agent/stitch.py.
Join = Literal["strict", "normalized", "retokenized", "split"]

Status = Literal[
    "submitted",  # the agent said it was done
    "closed",  # the agent ended its terminal
    "out_of_turns",  # the turn limit was reached
    "context_full",  # no room left in the context for another reply
    "length",  # a reply was cut by the token limit
    "timeout",  # the time of a turn, of the agent or of the trial was up
    "infra",  # sandbox or sampler failed: no reward, the trial is refilled
    "cancelled",  # the run did not wait for it
]


@dataclasses.dataclass(frozen=True)
class Turn:
    """One exchange: tokens *new* to the model (`context`), its reply, and what the sandbox answered.

    context i32[C], sampled i32[S], logprobs f32[S]. `action` is "command", "submit", "malformed",
    "summary" (see agent/episode.py; `result` then holds the screen), or "none" of a reply that was cut or aborted.
    `digest` is that of the reply as the sampler returned it; `drop` is (s, u) of a normalized join.
    """

    context: np.ndarray
    sampled: np.ndarray
    logprobs: np.ndarray
    finish: str
    version: int
    action: str
    command: str | None
    result: ExecResult | None
    seconds: float
    digest: str
    join: Join
    drop: tuple[int, int] = (0, 0)

    @property
    def drifted(self) -> int:
        """How many of the ids marked as sampled are not the sampler's own: 0 under TITO."""
        return 0 if digest(self.sampled) == self.digest else len(self.sampled)

    def __post_init__(self):
        if len(self.sampled) != len(self.logprobs):
            raise ValueError(
                f"turn has {len(self.sampled)} sampled ids but {len(self.logprobs)} log-probs"
            )


@dataclasses.dataclass(frozen=True)
class Assertion:
    """One test of the verifier's report."""

    name: str
    passed: bool


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the verifier said. `outcome` is the binary result, None where there was none at all.

    `cause` is "report" (per-assertion report read), or why there is none: "no_report", "no_tests",
    "bad_report", "bad_reward", "no_outcome", "verifier_timeout", "verifier_crash", "tampered", "infra".
    """

    assertions: tuple[Assertion, ...]
    outcome: bool | None
    cause: str
    output: str
    seconds: float

    @property
    def passing(self) -> int:
        return sum(a.passed for a in self.assertions)


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One chunk of one trial: a single token stream with aligned records.

    N = sum of all context and sampled tokens. experts u8|u16[N-1, L, K].
    `attempt` counts refills of the same trial after an infrastructure failure.
    """

    task: str
    family: str
    trial: int
    attempt: int
    chunk: int
    turns: tuple[Turn, ...]
    experts: np.ndarray
    status: Status
    cause: str  # detail behind the status, "" where there is none
    temperature: float
    verdict: Verdict | None = None
    reward: float | None = None
    seconds: float = 0.0

    @property
    def tokens(self) -> np.ndarray:
        """i32[N]."""
        return _join([p for t in self.turns for p in (t.context, t.sampled)], np.int32)

    @property
    def sampled(self) -> np.ndarray:
        """bool[N]: True exactly on ids the policy chose."""
        return np.concatenate(
            [
                np.full(len(p), v)
                for t in self.turns
                for p, v in ((t.context, False), (t.sampled, True))
            ]
            or [np.zeros(0, bool)]
        )

    @property
    def logprobs(self) -> np.ndarray:
        """f32[N]: the sampler's log-probs, 0 on context."""
        return _join(
            [p for t in self.turns for p in (np.zeros(len(t.context)), t.logprobs)], np.float32
        )

    @property
    def versions(self) -> np.ndarray:
        """i32[N]: the policy version that read or chose each token."""
        return _join(
            [np.full(len(t.context) + len(t.sampled), t.version) for t in self.turns], np.int32
        )

    @property
    def turn_index(self) -> np.ndarray:
        """i32[N]: which turn each token belongs to."""
        return _join(
            [np.full(len(t.context) + len(t.sampled), i) for i, t in enumerate(self.turns)],
            np.int32,
        )

    @property
    def ended(self) -> bool:
        """True where the episode came to its own end; False where a limit cut it (truncation)."""
        return self.status in ("submitted", "closed")

    @property
    def resolved(self) -> bool:
        """True where the verifier's binary outcome is a pass (never `reward > 0`)."""
        return self.verdict is not None and self.verdict.outcome is True

    def check(self) -> None:
        """Raises ValueError with the offending place when the aligned records disagree."""
        n = len(self.tokens)
        if len(self.experts) != max(n - 1, 0):
            raise ValueError(
                f"trial {self.trial}: {len(self.experts)} rows of experts for {n} tokens, need {n - 1}"
            )
        bad = np.flatnonzero(self.sampled & ~(np.isfinite(self.logprobs) & (self.logprobs <= 0)))
        if len(bad):
            raise ValueError(
                f"trial {self.trial}: token {bad[0]} was sampled with log-prob {self.logprobs[bad[0]]}"
            )


class SamplerError(RuntimeError):
    """The sampler itself failed (engine gone, no answer): an infrastructure error."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; training needs top_p 1 and top_k 0. Raises ValueError for greedy decoding."""

    temperature: float
    top_p: float
    top_k: int  # 0 = off

    def __post_init__(self):
        if not self.temperature > 0:
            raise ValueError(
                f"temperature {self.temperature} is not positive: log-probs mean nothing"
            )
        if not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(
                f"top_p={self.top_p}, top_k={self.top_k}: need 0 < top_p <= 1, top_k >= 0"
            )


class Sampler(Protocol):
    """What produces tokens: the embedded engine.JaxSampler or an SGLang client."""

    async def admit(self) -> None:
        """Returns when one more trial may start. Its own time has not begun then.

        Raises SamplerError when the engine is gone.
        """

    async def sample(
        self,
        trial: int,
        turn: int,
        tokens: np.ndarray,
        experts_start: int,
        max_new: int,
    ) -> Sampled:
        """Continues the stream `tokens` i32[N] by at most `max_new` ids.

        `experts_start`: how many rows of experts the caller already holds; the reply starts there.
        Raises ValueError for ids outside the vocabulary or a stream longer than the context, SamplerError
        when the engine is gone.
        """

    async def release(self, trial: int) -> None:
        """Ends the trial: whatever was cached for it may go."""


class Engine(Sampler, Protocol):
    """A sampler that a run feeds with weights."""

    version: int  # of the weights loaded; -1 before the first
    sampling: Sampling  # may be set while no request is in flight
    rewritten: int  # tokens it had read or said that the trial's next stream did not repeat

    def load(self, params: Any, version: int) -> None:
        """Publishes weights; all that is cached under older ones is forgotten.

        Raises RuntimeError while requests are in flight, SamplerError where the engine does not follow.
        """

    def warm_up(self) -> None:
        """Makes ready what a trial's time should not pay for. Call it after the first `load`."""

    def close(self) -> None:
        """Ends the engine. Idempotent."""


def _join(parts: list[np.ndarray], dtype) -> np.ndarray:
    return np.concatenate([np.asarray(p, dtype) for p in parts] or [np.zeros(0, dtype)])
