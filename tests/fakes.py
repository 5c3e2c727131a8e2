"""A sampler that follows a script. It runs through the real loop, the real chat and a real sandbox."""

import asyncio
import dataclasses
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from t1jax.agent.chat import Chat
from t1jax.agent.episode import EpisodeConfig, run_episode
from t1jax.agent.families import FAMILIES
from t1jax.agent.generate import instances, write_task
from t1jax.agent.task import load_task
from t1jax.rollout.collect import CollectConfig
from t1jax.sandbox.namespace import NamespaceSandbox, SandboxUnavailable, check_available
from t1jax.types import Sampled, Task, Trajectory, digest

TOKENIZER = Path(__file__).parent.parent / "configs/assets/tiny/tokenizer.json"
LAYERS, TOP_K = 3, 2
EPISODE = EpisodeConfig(
    protocol="bash",
    history="tokens",
    max_turns=8,
    max_context=4000,
    max_reply=200,
    compact_below=0,
    max_summary=0,
    command_timeout_s=5.0,
    turn_timeout_s=60.0,
    agent_timeout_s=20.0,
    trial_timeout_s=90.0,
    max_output_bytes=1000,
)
COLLECT = CollectConfig(
    episode=EPISODE,
    temperature=1.0,
    reward_kind="dense",
    reward_scale=20.0,
    concurrency=4,
    max_attempts=3,
    max_infra_share=0.25,
)

Reply = str | np.ndarray | BaseException | Callable


@dataclasses.dataclass(frozen=True)
class Call:
    """What the loop asked for."""

    trial: int
    turn: int
    tokens: np.ndarray
    experts_start: int
    max_new: int


class ScriptedSampler:
    """Implements types.Sampler. `script[trial]` lists the replies of a trial, one a turn.

    A reply is text (closed by <|im_end|>), ids, an exception to raise, or an async function that is
    awaited first and gives one of them. `change` may alter what is returned. `calls` and `released` are
    the record; every stream must repeat what the sampler has seen and said before, token for token, unless it
    is a new one, of which no experts are held.
    """

    def __init__(
        self,
        chat: Chat,
        script: Mapping[int, Sequence[Reply]],
        change: Callable[[Sampled], Sampled] = lambda sampled: sampled,
    ):
        self._chat, self._script, self._change = chat, script, change
        self._seen: dict[int, np.ndarray] = {}
        self.calls: list[Call] = []
        self.released: list[int] = []

    async def admit(self) -> None:
        pass

    async def sample(self, trial, turn, tokens, experts_start, max_new) -> Sampled:
        self.calls.append(Call(trial, turn, tokens, experts_start, max_new))
        nothing = np.zeros(0, np.int32)
        before = self._seen.get(trial, nothing) if experts_start else nothing
        assert tokens.dtype == np.int32 and len(tokens) > len(before)
        np.testing.assert_array_equal(tokens[: len(before)], before, "the stream was rewritten")
        reply = self._script[trial][turn]
        if callable(reply):
            reply = await reply()
        if isinstance(reply, BaseException):
            raise reply
        await asyncio.sleep(0)
        ids = self._chat.reply(reply) if isinstance(reply, str) else reply
        finish = "stop" if len(ids) <= max_new else "length"
        ids = ids[:max_new]
        self._seen[trial] = np.concatenate([tokens, ids])
        return self._change(
            Sampled(
                ids=ids,
                logprobs=logprobs_of(ids),
                experts=experts_of(self._seen[trial])[experts_start:],
                experts_start=experts_start,
                finish=finish,
                version=7,
                seconds=0.0,
                digest=digest(ids),
            )
        )

    async def release(self, trial) -> None:
        self.released.append(trial)
        self._seen.pop(trial, None)

    def asked(self) -> dict[int, list[Call]]:
        """The calls by trial."""
        calls = defaultdict(list)
        for call in self.calls:
            calls[call.trial].append(call)
        return dict(calls)


def logprobs_of(ids: np.ndarray) -> np.ndarray:
    """f32[S]: a log-prob that tells which id it belongs to."""
    return -(1 + np.asarray(ids, np.float32)) / 1024


def experts_of(tokens: np.ndarray) -> np.ndarray:
    """u8[N-1, LAYERS, TOP_K]: experts that tell which position and which id they belong to."""
    place = np.arange(len(tokens) - 1) * 31 + tokens[:-1]
    grid = np.arange(LAYERS)[:, None] * TOP_K + np.arange(TOP_K)
    return ((place[:, None, None] + grid) % 251).astype(np.uint8)


def bash(command: str) -> str:
    """A reply in the bash protocol."""
    return f"```bash\n{command}\n```"


SUBMIT = "```submit\n```"


def replies(script: Sequence[str]) -> list[str]:
    """The replies of a script: its commands, then submit."""
    return [*map(bash, script), SUBMIT]


def run_script(
    task: Task, chat: Chat, script: Sequence[Reply], config: EpisodeConfig, trial: int = 5
) -> tuple[list[Trajectory], ScriptedSampler]:
    """One episode in a sandbox of its own: its chunks, checked, and what was asked of the sampler."""
    sampler = ScriptedSampler(chat, {trial: script})

    async def main():
        sandbox = await NamespaceSandbox.start(task, config.max_output_bytes)
        try:
            return await run_episode(task, sandbox, sampler, chat, config, trial, 0, 1.0)
        finally:
            await sandbox.close()

    chunks = asyncio.run(main())
    for number, chunk in enumerate(chunks):
        chunk.check()
        assert (chunk.chunk, chunk.trial) == (number, trial)
        if chunk.turns:
            np.testing.assert_array_equal(chunk.experts, experts_of(chunk.tokens))
    return chunks, sampler


def terminus(*keys: str, done: bool = False, wait: float = 0.1) -> str:
    """A reply in the terminus protocol."""
    commands = [{"keystrokes": k, "duration": wait} for k in keys]
    return json.dumps({"analysis": "", "plan": "", "commands": commands, "task_complete": done})


def generated(folder: Path, count: int = len(FAMILIES)) -> list[tuple[Task, Sequence[str]]]:
    """Generated tasks, one of each family in turn, with their solutions."""
    pairs = []
    for i, instance in enumerate(itertools.islice(instances("train", 0), count)):
        write_task(folder / f"{i}-{instance.family}", instance, "train", 0)
        pairs.append((load_task(folder / f"{i}-{instance.family}"), instance.solution))
    return pairs


def need_sandbox() -> None:
    """Fails the test, with the reason, where the machine has no namespaces to offer."""
    try:
        check_available()
    except SandboxUnavailable as error:
        pytest.fail(str(error))
