"""One episode: the policy and a sandbox in turns, until one of the named ends.

What the sampler reads and the trainer gets is kept by a history (agent/history.py). By default token ids are
the source of truth, and text is derived from them, never the other way round.

Compaction: where fewer than `compact_below` tokens of the context are free, the policy is asked for a summary. That
is a turn like any other, the last of its chunk. A new chunk of the same trial opens with the task, the summary and
what the terminal shows. A summary that was cut is not used: the new chunk says that there is none.
"""

import asyncio
import dataclasses

import numpy as np

from t1jax.agent.action import SYSTEM, Action, Malformed, Protocol, Submit, observation, parse
from t1jax.agent.chat import Chat
from t1jax.agent.history import History, Kind, make_history
from t1jax.agent.record import Record
from t1jax.agent.shell import Console, open_console
from t1jax.agent.template import TemplateError
from t1jax.agent.terminal import TerminalClosed
from t1jax.sandbox.protocol import Sandbox, SandboxError
from t1jax.types import ExecResult, Sampled, Sampler, SamplerError, Task, Trajectory


@dataclasses.dataclass(frozen=True)
class EpisodeConfig:
    """Tokens, turns and seconds of one episode, how the model speaks, and what is kept of that.

    Deadlines are layered: command < turn < agent < trial. Raises ValueError where summaries would not fit.
    """

    protocol: Protocol
    history: Kind
    max_turns: int  # replies that are sampled, summaries too
    max_context: int  # tokens of the whole stream of a chunk
    max_reply: int  # tokens of one reply
    compact_below: int  # free tokens of the context below which it is summarized; 0 = never
    max_summary: int  # tokens of a summary
    command_timeout_s: float  # in terminus the longest wait for one, 60 s at most
    turn_timeout_s: float  # a reply and the commands in it
    agent_timeout_s: float  # all turns; the task's own limit holds where it is shorter
    trial_timeout_s: float  # the sandbox's start and end, too; see rollout/collect.py
    max_output_bytes: int  # of what one reply's commands print; head and tail are kept

    def __post_init__(self):
        if self.compact_below <= 0:
            return
        if self.history == "retokenized":
            raise ValueError("compact_below needs history tokens or stitched, or 0")
        if not 0 < self.max_summary < self.compact_below - self.max_reply:
            raise ValueError(
                f"compact_below={self.compact_below} free tokens must hold max_reply={self.max_reply} and "
                f"max_summary={self.max_summary}, or summaries are cut"
            )
        if self.compact_below + self.max_summary >= self.max_context:
            raise ValueError(
                f"max_context={self.max_context} must be above compact_below={self.compact_below} and "
                f"max_summary={self.max_summary}, or every chunk is summarized at once"
            )


def summary_request(max_summary: int) -> str:
    """What asks for a summary; a word has fewer than two tokens."""
    return (
        "The conversation is too long to go on and will be closed. Only the task, your summary and the present "
        "screen will be there when you continue, so write down what you need: what you did and what it showed; "
        "what you found out (files, settings, errors, the state of things); which problems came up and how you "
        f"solved them; and where exactly you are now. Reply with the summary alone, in at most {max_summary // 2} "
        "words: a longer one is lost."
    )


def opening(instruction: str, screen: str, summary: str | None = None) -> str:
    """The first message of a chunk. summary: None in the first chunk, "" where it was lost."""
    parts = [instruction, screen]
    if summary is not None:
        there = f"Your summary of the work so far:\n{summary}"
        lost = "You have worked on this before, but there is no summary of it: it was too long."
        parts.insert(1, there if summary.strip() else lost)
    return "\n\n".join(filter(None, parts))


async def run_episode(
    task: Task,
    sandbox: Sandbox,
    sampler: Sampler,
    chat: Chat,
    config: EpisodeConfig,
    trial: int,
    attempt: int,
    temperature: float,
    until: float | None = None,
) -> list[Trajectory]:
    """Runs one trial up to its end: a trajectory a chunk, without a verdict yet.

    until: when the trial's time is over, by the loop's clock. A failing sandbox or sampler ends it with status
    "infra" and no further model calls; running out of time, turns or context keeps what was done. Cancellation
    passes through. The sampler is released. Raises ValueError when the sampler's records do not fit the
    stream, TemplateError when a prompt does not render.
    """
    record = Record(task, trial, attempt, temperature)
    episode = _Episode(task, sandbox, sampler, chat, config, record)
    seconds = min(config.agent_timeout_s, task.agent_timeout_s)
    over = f"the agent's {seconds:g} s were over"
    if until is not None and (left := until - asyncio.get_running_loop().time()) < seconds:
        seconds, over = left, f"the trial's {config.trial_timeout_s:g} s were over"
    try:
        async with asyncio.timeout(seconds) as deadline:
            await episode.play()
    except _End as end:
        status, cause = end.args
    except TerminalClosed as error:
        status, cause = "closed", str(error)
    except (SandboxError, SamplerError, OSError) as error:  # a TimeoutError is an OSError
        if deadline.expired():
            status, cause = "timeout", over
        else:
            status, cause = "infra", f"{type(error).__name__}: {error}"
    finally:
        await sampler.release(trial)
    return record.chunks(episode.history, status, cause)


class _End(Exception):
    """How the episode ended: status and cause."""


class _Episode:
    """A trial under way. Its methods raise what ends it."""

    history: History | None = None
    _console: Console

    def __init__(self, task, sandbox, sampler, chat, config, record):
        self._task, self._sandbox, self._sampler = task, sandbox, sampler
        self._chat, self._config, self._record = chat, config, record
        self._fresh = True  # the chunk has no turn yet
        self._asked = (
            False  # the agent has just said that it is done, and was asked whether it is sure
        )
        self._closed = False  # the last reply ended in the template's own token

    async def play(self) -> None:
        c = self._config
        self._console = await open_console(
            c.protocol, self._sandbox, c.command_timeout_s, c.max_output_bytes
        )
        first = opening(self._task.instruction, await self._console.screen())
        self.history = make_history(c.history, self._chat, SYSTEM[c.protocol], first)
        for turn in range(c.max_turns):
            try:
                async with asyncio.timeout(c.turn_timeout_s) as deadline:
                    await self._take(turn)
            except TimeoutError:
                if not deadline.expired():
                    raise
                raise _End("timeout", f"turn {turn} took {c.turn_timeout_s:g} s") from None
        raise _End("out_of_turns", f"{c.max_turns} turns")

    async def _take(self, turn: int) -> None:
        """A reply and what comes of it."""
        prompt, room = self._prompt(turn)
        if room < self._config.compact_below and not self._fresh:
            return await self._compact(turn)
        reply = await self._sample(turn, prompt, min(self._config.max_reply, room))
        if reply.finish == "length":
            raise _End("length", f"a reply was cut at {len(reply.ids)} tokens")
        action = parse(self._chat.reply_text(reply.ids), self._config.protocol)
        self._record.amend(**describe(action))
        result = None
        if not isinstance(action, Malformed):
            result = await self._console.run(action.lines)
            self._record.amend(result=result)
        done = isinstance(action, Submit)
        if done and (self._asked or self._config.protocol == "bash"):
            raise _End("submitted", "")
        self._asked, self._fresh = done, False
        text = observation(action, result, self._config.protocol)
        self.history.observe(text, self._closed)

    async def _compact(self, turn: int) -> None:
        """Asks for a summary instead of showing what came of the last turn, and begins a chunk with it."""
        self.history.observe(summary_request(self._config.max_summary), self._closed)
        prompt, room = self._prompt(turn)
        reply = await self._sample(turn, prompt, min(self._config.max_summary, room), "summary")
        summary = "" if reply.finish == "length" else self._chat.reply_text(reply.ids)
        screen = await self._console.screen()
        self._record.amend(result=ExecResult(0, screen, 0.0, False))
        self.history.reopen(opening(self._task.instruction, screen, summary))
        self._fresh, self._asked = True, False

    def _prompt(self, turn: int) -> tuple[np.ndarray, int]:
        """i32[N], and how many tokens may follow it."""
        try:
            prompt = self.history.prompt()
        except TemplateError as error:
            raise TemplateError(f"trial {self._record.trial}, turn {turn}: {error}") from None
        return prompt, self._config.max_context - max(len(prompt), self.history.length)

    async def _sample(
        self, turn: int, prompt: np.ndarray, most: int, action: str = "none"
    ) -> Sampled:
        """At most `most` tokens after the prompt, recorded."""
        if most < 1:
            raise _End("context_full", f"{self._config.max_context} tokens")
        trial = self._record.trial
        reply = await self._sampler.sample(trial, turn, prompt, self.history.rows, most)
        try:
            joined = self.history.add(reply)
        except ValueError as error:
            raise ValueError(f"trial {trial}, turn {turn}: {error}") from None
        self._record.add(joined, reply, action)
        if reply.finish == "abort":
            raise _End("infra", "the sampler aborted the reply")
        self._closed = len(reply.ids) > 0 and reply.ids[-1] == self._chat.stop_ids[0]
        return reply


def describe(action: Action) -> dict[str, str | None]:
    """Its name and what it types, as a turn records them."""
    if isinstance(action, Malformed):
        return {"action": "malformed", "command": None}
    command = "\n".join(line.text for line in action.lines) or None
    return {"action": "submit" if isinstance(action, Submit) else "command", "command": command}
