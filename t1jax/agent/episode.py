"""One episode: the policy and a sandbox in turns, until one of the named ends.

Token ids are the source of truth: the stream only grows, by context ids that the chat encodes once and
by the ids the sampler chose. Text is derived from it, never the other way round.
"""

import asyncio
import dataclasses
import time

import numpy as np

from t1jax.agent.action import SYSTEM, Command, Line, Malformed, Protocol, Submit, parse
from t1jax.agent.chat import Chat
from t1jax.types import ExecResult, Sampled, Sampler, Sandbox, SandboxError, Task, Trajectory, Turn

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
    max_output_bytes: int


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
    """
    stream = _Stream(task, trial, attempt, temperature)
    limit = min(limits.agent_timeout_s, task.agent_timeout_s)
    try:
        async with asyncio.timeout(limit):
            status, cause = await _converse(stream, sandbox, sampler, chat, limits, protocol)
    except TimeoutError:
        status, cause = "timeout", f"the agent's {limit:g} s were over"
    except (SandboxError, OSError) as error:
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
        started = time.monotonic()
        tokens = np.concatenate([stream.tokens, context])
        reply = await sampler.sample(
            stream.trial, len(stream.turns), tokens, stream.rows, min(limits.max_reply, room)
        )
        stream.check(reply, len(tokens))
        if reply.finish == "abort":
            stream.add(context, reply, "none", None, None, started)
            return "infra", "the sampler aborted the reply"
        if reply.finish == "length":
            stream.add(context, reply, "none", None, None, started)
            full = room <= limits.max_reply
            return ("context_full", f"{limits.max_context} tokens") if full else ("length", "")
        action = parse(chat.decode(reply.ids[:-1]), protocol)
        if isinstance(action, Malformed):
            stream.add(context, reply, "malformed", None, None, started)
            text, confirming = action.message, False
        else:
            text, result = await _run(sandbox, action.lines, limits)
            submit = isinstance(action, Submit)
            command = "\n".join(line.text for line in action.lines) or None
            stream.add(context, reply, "submit" if submit else "command", command, result, started)
            if submit and (confirming or protocol == "bash"):
                return "submitted", ""
            confirming = submit
            text = f"{text}\n{CONFIRM}".strip() if submit else text or SILENT
        context = chat.observation(text)
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
    return "\n".join(texts), result


class _Stream:
    """The growing records of one trial; refuses whatever does not join exactly."""

    def __init__(self, task: Task, trial: int, attempt: int, temperature: float):
        self.task, self.trial, self.attempt = task, trial, attempt
        self.tokens = np.zeros(0, np.int32)
        self.turns: list[Turn] = []
        self.rows = 0
        self._temperature, self._experts = temperature, []
        self._started = time.monotonic()

    def check(self, reply: Sampled, context: int) -> None:
        """Raises ValueError unless the reply's experts continue the recorded ones up to its last token."""
        rows, wanted = len(reply.experts), context + len(reply.ids) - 1 - self.rows
        if reply.experts_start != self.rows or rows != wanted:
            raise ValueError(
                f"trial {self.trial}: the sampler returned {rows} rows of experts from "
                f"{reply.experts_start}, expected {wanted} from {self.rows}"
            )

    def add(self, context, reply: Sampled, action, command, result, started: float) -> None:
        self.turns.append(
            Turn(
                context=context,
                sampled=reply.ids,
                logprobs=reply.logprobs,
                finish=reply.finish,
                version=reply.version,
                action=action,
                command=command,
                result=result,
                seconds=time.monotonic() - started,
            )
        )
        self.tokens = np.concatenate([self.tokens, context, reply.ids]).astype(np.int32)
        self._experts.append(reply.experts)
        self.rows += len(reply.experts)

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
