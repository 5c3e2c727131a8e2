"""A script in the place of a policy: what SFT imitates, and what benchmarks run."""

from collections.abc import Mapping

import numpy as np

from t1jax.agent.chat import Chat
from t1jax.agent.families import Script
from t1jax.types import Sampled, digest


class ScriptSampler:
    """A sampler that replies with a trial's commands, one a turn, then submits."""

    def __init__(self, chat: Chat, scripts: Mapping[int, Script]):
        self._chat, self._scripts = chat, scripts

    async def admit(self) -> None:
        pass

    async def sample(self, trial, turn, tokens, experts_start, max_new) -> Sampled:
        script = self._scripts[trial]
        text = f"```bash\n{script[turn]}\n```" if turn < len(script) else "```submit\n```"
        ids = self._chat.reply(text)
        rows = len(tokens) + len(ids) - 1 - experts_start
        return Sampled(
            ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            experts=np.zeros((rows, 1, 1), np.uint8),
            experts_start=experts_start,
            finish="stop",
            version=0,
            seconds=0.0,
            digest=digest(ids),
        )

    async def release(self, trial) -> None:
        pass
