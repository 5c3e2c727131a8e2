"""One episode: the policy and a sandbox in turns, until one of the named ends.

Token ids are the source of truth: the stream only grows, by context ids that the chat encodes once and
by the ids the sampler chose. Text is derived from it, never the other way round.
"""

import asyncio
import dataclasses
import time

import numpy as np

from t1jax.agent.action import SYSTEM, Line, Malformed, Protocol, Submit, parse
from t1jax.agent.chat import Chat
from t1jax.sandbox.output import Output
from t1jax.types import (
    ExecResult,
    Sampled,
    Sampler,
    SamplerError,
    Sandbox,
    SandboxError,
    Task,
    Trajectory,
    Turn,
)

CONFIRM = "Are you sure? Set task_complete again to end."
SILENT = "ok"  # what the agent reads of a command that printed nothing


@dataclasses.dataclass(frozen=True)
class EpisodeLimits:
    """Tokens, turns and seconds of one episode. Deadlines are layered: command < agent."""

    max_turns: int
    max_context: int  # tokens of the whole stream
    max_reply: int  # tokens of one reply
    command_timeout_s: float
    agent_timeout_s: float  # the task's own limit holds where it is shorter
    max_output_bytes: int  # of what one reply's commands print; head and tail are kept


async def run_episode(
    task: Task,
    sandbox: Sandbox,
    sampler: Sampler,
    chat: Chat,
    limits: EpisodeLimits,
    protocol: Protocol,
    trial: int,
    attempt: int,
    temperature: float,
) -> Trajectory:
    """Runs one trial up to its end; the trajectory has no verdict yet.

    A failing sandbox or sampler ends it with status "infra" and no further model calls; running out of
    time, turns or context keeps what was done. Cancellation passes through. The sampler is released.
    Raises ValueError when the sampler's records do not fit the stream.
    """
    stream = _Stream(task, trial, attempt, temperature)
    limit = min(limits.agent_timeout_s, task.agent_timeout_s)
    try:
        async with asyncio.timeout(limit) as deadline:
            status, cause = await _converse(stream, sandbox, sampler, chat, limits, protocol)
    except (SandboxError, SamplerError, OSError) as error:  # a TimeoutError is an OSError
        if deadline.expired():
            status, cause = "timeout", f"the agent's {limit:g} s were over"
        else:
            status, cause = "infra", f"{type(error).__name__}: {error}"
    finally:
        await sampler.release(trial)
    return stream.trajectory(status, cause)


async def _converse(stream, sandbox, sampler, chat, limits, protocol) -> tuple[str, str]:
    """The turns of an episode; returns its status and cause."""
    context = chat.opening(SYSTEM[protocol], stream.task.instruction)
    confirming = False
    for _ in range(limits.max_turns):
        room = limits.max_context - len(stream.tokens) - len(context)
        if room < 1:
            return "context_full", f"{limits.max_context} tokens"
        tokens = np.concatenate([stream.tokens, context])
        reply = await sampler.sample(
            stream.trial, len(stream.turns), tokens, stream.rows, min(limits.max_reply, room)
        )
        stream.add(context, reply)
        if reply.finish == "abort":
            return "infra", "the sampler aborted the reply"
        if reply.finish == "length":
            return "length", f"a reply was cut at {len(reply.ids)} tokens"
        stopped = len(reply.ids) > 0 and reply.ids[-1] in chat.stop_ids
        action = parse(chat.decode(reply.ids[:-1] if stopped else reply.ids), protocol)
        if isinstance(action, Malformed):
            stream.amend(action="malformed")
            text, confirming = action.message, False
        else:
            submit = isinstance(action, Submit)
            command = "\n".join(line.text for line in action.lines) or None
            stream.amend(action="submit" if submit else "command", command=command)
            text, result = await _run(sandbox, action.lines, limits)
            stream.amend(result=result)
            if submit and (confirming or protocol == "bash"):
                return "submitted", ""
            confirming = submit
            text = f"{text}\n{CONFIRM}".strip() if submit else text or SILENT
        context = chat.observation(text, closed=stopped and reply.ids[-1] == chat.stop_ids[0])
    return "out_of_turns", f"{limits.max_turns} turns"


async def _run(
    sandbox: Sandbox, lines: tuple[Line, ...], limits: EpisodeLimits
) -> tuple[str, ExecResult | None]:
    """Runs an action's lines in order; returns what the agent reads and the last line's result."""
    texts, result = [], None
    for line in lines:
        seconds = min(line.wait_s or limits.command_timeout_s, limits.command_timeout_s)
        result = await sandbox.run(line.text, seconds)
        output = result.output.strip("\n")
        if result.exit_code:
            output = f"exit {result.exit_code}\n{output}".rstrip("\n")
        if output:
            texts.append(output)
    if len(texts) > 1:
        together = Output(limits.max_output_bytes)
        together.add("\n".join(texts).encode())
        return together.text(), result
    return "".join(texts), result


class _Stream:
    """The growing records of one trial; refuses whatever does not join exactly."""

    def __init__(self, task: Task, trial: int, attempt: int, temperature: float):
        self.task, self.trial, self.attempt = task, trial, attempt
        self.tokens = np.zeros(0, np.int32)
        self.turns: list[Turn] = []
        self.rows = 0
        self._temperature, self._experts = temperature, []
        self._started = self._lapped = time.monotonic()

    def add(self, context: np.ndarray, reply: Sampled) -> None:
        """Appends a reply and the context before it. Raises ValueError unless its experts join exactly.

        A sampler may return rows that are held already (from `experts_start` on); those are dropped.
        """
        start, end = reply.experts_start, len(self.tokens) + len(context) + len(reply.ids) - 1
        if not 0 <= start <= self.rows or start + len(reply.experts) != end:
            raise ValueError(
                f"trial {self.trial}, turn {len(self.turns)}: the sampler returned experts of tokens "
                f"[{start}, {start + len(reply.experts)}), needed are [{self.rows}, {end})"
            )
        self._experts.append(reply.experts[self.rows - start :])
        self.rows = end
        self.tokens = np.concatenate([self.tokens, context, reply.ids]).astype(np.int32)
        self.turns.append(
            Turn(
                context=context,
                sampled=reply.ids,
                logprobs=reply.logprobs,
                finish=reply.finish,
                version=reply.version,
                action="none",
                command=None,
                result=None,
                seconds=self._lap(),
            )
        )

    def amend(self, **fields) -> None:
        """Completes the last turn, once its reply has been understood and once it has been carried out."""
        last = self.turns[-1]
        self.turns[-1] = dataclasses.replace(last, seconds=last.seconds + self._lap(), **fields)

    def _lap(self) -> float:
        """Seconds since the last call."""
        before, self._lapped = self._lapped, time.monotonic()
        return self._lapped - before

    def trajectory(self, status: str, cause: str) -> Trajectory:
        if self._experts:
            experts = np.concatenate(self._experts)
        else:
            experts = np.zeros((0, 0, 0), np.uint8)
        return Trajectory(
            task=self.task.name,
            family=self.task.family,
            trial=self.trial,
            attempt=self.attempt,
            chunk=0,
            turns=tuple(self.turns),
            experts=experts,
            status=status,
            cause=cause,
            temperature=self._temperature,
            seconds=time.monotonic() - self._started,
        )
