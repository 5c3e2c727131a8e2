"""The turns of a trial while it is under way, and the trajectories they become."""

import dataclasses
import itertools
import time
from typing import Any

import numpy as np

from t1jax.agent.history import History, Joined, Said
from t1jax.types import Sampled, Task, Trajectory, Turn


class Record:
    """What became of one trial, turn by turn."""

    def __init__(self, task: Task, trial: int, attempt: int, temperature: float):
        self.task, self.trial, self.attempt = task, trial, attempt
        self.turns: list[Turn] = []
        self._temperature = temperature
        self._started = self._lapped = time.monotonic()

    def add(self, joined: Joined, reply: Sampled, action: str) -> None:
        self.turns.append(
            Turn(
                context=joined.context,
                sampled=reply.ids,
                logprobs=reply.logprobs,
                finish=reply.finish,
                version=reply.version,
                action=action,
                command=None,
                result=None,
                seconds=self._lap(),
                digest=reply.digest,
                join=joined.join,
                drop=joined.drop,
            )
        )

    def amend(self, **fields: Any) -> None:
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
