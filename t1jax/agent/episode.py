"""One episode: the policy and a sandbox in turns, until one of the named ends.

What the sampler reads and the trainer gets is kept by a history (agent/history.py). By default token ids are
the source of truth, and text is derived from them, never the other way round.
"""

import asyncio
import dataclasses
import itertools
import time

import numpy as np

from t1jax.agent.action import SYSTEM, Line, Malformed, Protocol, Submit, parse
from t1jax.agent.chat import Chat
from t1jax.agent.history import History, Joined, Kind, Said, make_history
from t1jax.agent.template import TemplateError
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
class EpisodeConfig:
    """Tokens, turns and seconds of one episode, how the model speaks, and what is kept of that.

    Deadlines are layered: command < agent.
    """

    protocol: Protocol
    history: Kind
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
    config: EpisodeConfig,
    trial: int,
    attempt: int,
    temperature: float,
) -> list[Trajectory]:
    """Runs one trial up to its end: a trajectory a chunk, without a verdict yet.

    A failing sandbox or sampler ends it with status "infra" and no further model calls; running out of
    time, turns or context keeps what was done. Cancellation passes through. The sampler is released.
    Raises ValueError when the sampler's records do not fit the stream, TemplateError when a prompt does not
    render.
    """
    record = _Record(task, trial, attempt, temperature)
    history = make_history(config.history, chat, SYSTEM[config.protocol], task.instruction)
    limit = min(config.agent_timeout_s, task.agent_timeout_s)
    try:
        async with asyncio.timeout(limit) as deadline:
            status, cause = await _converse(record, history, sandbox, sampler, chat, config)
    except (SandboxError, SamplerError, OSError) as error:  # a TimeoutError is an OSError
        if deadline.expired():
            status, cause = "timeout", f"the agent's {limit:g} s were over"
        else:
            status, cause = "infra", f"{type(error).__name__}: {error}"
    finally:
        await sampler.release(trial)
    return record.chunks(history, status, cause)


async def _converse(record, history, sandbox, sampler, chat, config) -> tuple[str, str]:
    """The turns of an episode; returns its status and cause."""
    confirming = False
    for turn in range(config.max_turns):
        try:
            prompt = history.prompt()
        except TemplateError as error:
            raise TemplateError(f"trial {record.trial}, turn {turn}: {error}") from None
        room = config.max_context - max(len(prompt), history.length)
        if room < 1:
            return "context_full", f"{config.max_context} tokens"
        reply = await sampler.sample(
            record.trial, turn, prompt, history.rows, min(config.max_reply, room)
        )
        try:
            joined = history.add(reply)
        except ValueError as error:
            raise ValueError(f"trial {record.trial}, turn {turn}: {error}") from None
        record.add(joined, reply)
        if reply.finish == "abort":
            return "infra", "the sampler aborted the reply"
        if reply.finish == "length":
            return "length", f"a reply was cut at {len(reply.ids)} tokens"
        action = parse(chat.reply_text(reply.ids), config.protocol)
        if isinstance(action, Malformed):
            record.amend(action="malformed")
            text, confirming = action.message, False
        else:
            submit = isinstance(action, Submit)
            command = "\n".join(line.text for line in action.lines) or None
            record.amend(action="submit" if submit else "command", command=command)
            text, result = await _run(sandbox, action.lines, config)
            record.amend(result=result)
            if submit and (confirming or config.protocol == "bash"):
                return "submitted", ""
            confirming = submit
            text = f"{text}\n{CONFIRM}".strip() if submit else text or SILENT
        history.observe(text, closed=len(reply.ids) > 0 and reply.ids[-1] == chat.stop_ids[0])
    return "out_of_turns", f"{config.max_turns} turns"


async def _run(
    sandbox: Sandbox, lines: tuple[Line, ...], config: EpisodeConfig
) -> tuple[str, ExecResult | None]:
    """Runs an action's lines in order; returns what the agent reads and the last line's result."""
    texts, result = [], None
    for line in lines:
        seconds = min(line.wait_s or config.command_timeout_s, config.command_timeout_s)
        result = await sandbox.run(line.text, seconds)
        output = result.output.strip("\n")
        if result.exit_code:
            output = f"exit {result.exit_code}\n{output}".rstrip("\n")
        if output:
            texts.append(output)
    if len(texts) > 1:
        together = Output(config.max_output_bytes)
        together.add("\n".join(texts).encode())
        return together.text(), result
    return "".join(texts), result


class _Record:
    """What became of one trial, turn by turn."""

    def __init__(self, task: Task, trial: int, attempt: int, temperature: float):
        self.task, self.trial, self.attempt = task, trial, attempt
        self.turns: list[Turn] = []
        self._temperature = temperature
        self._started = self._lapped = time.monotonic()

    def add(self, joined: Joined, reply: Sampled) -> None:
        self.turns.append(
            Turn(
                context=joined.context,
                sampled=reply.ids,
                logprobs=reply.logprobs,
                finish=reply.finish,
                version=reply.version,
                action="none",
                command=None,
                result=None,
                seconds=self._lap(),
                digest=reply.digest,
                join=joined.join,
                drop=joined.drop,
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

    def chunks(self, history: History, status: str, cause: str) -> list[Trajectory]:
        """One trajectory a chunk, at least one."""
        if not self.turns:
            return [self._chunk(0, [], np.zeros((0, 0, 0), np.uint8), status, cause)]
        said = history.rewrite([Said(t.context, t.sampled, t.logprobs) for t in self.turns])
        turns = [
            dataclasses.replace(turn, **words._asdict())
            for turn, words in zip(self.turns, said, strict=True)
        ]
        begins = [i for i, turn in enumerate(turns) if turn.join == "split"]
        ranges = itertools.pairwise([*begins, len(turns)])
        return [
            self._chunk(n, turns[begin:end], experts, status, cause)
            for n, ((begin, end), experts) in enumerate(zip(ranges, history.experts(), strict=True))
        ]

    def _chunk(self, number: int, turns, experts, status: str, cause: str) -> Trajectory:
        return Trajectory(
            task=self.task.name,
            family=self.task.family,
            trial=self.trial,
            attempt=self.attempt,
            chunk=number,
            turns=tuple(turns),
            experts=experts,
            status=status,
            cause=cause,
            temperature=self._temperature,
            seconds=time.monotonic() - self._started,
        )
