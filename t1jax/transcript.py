"""What was said in a trial, as text."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from t1jax.agent.chat import SPECIAL_TOKENS, Chat, Rendered
from t1jax.agent.history import Kind
from t1jax.agent.template import MARKS, conversation
from t1jax.types import Trajectory


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A reply of the model, and what was read next; None where nothing followed.

    copied: it was said elsewhere, and stands here as context.
    """

    reply: str
    observation: str | None
    copied: bool = False


@dataclasses.dataclass(frozen=True)
class Transcript:
    """system: None where none is known. resolved: the verifier's outcome, None where that is not known."""

    system: str | None
    task: str
    exchanges: tuple[Exchange, ...]
    resolved: bool | None


class Glue(NamedTuple):
    """The template's own text around the messages, special tokens spelt out."""

    before_system: str
    before_task: str
    after_task: str
    before_observation: str
    after_observation: str


def make_transcribe(chat: Chat, history: Kind) -> Callable[[Sequence[Trajectory]], Transcript]:
    """A function of the chunks of a trial, in order, which needs at least one turn.

    Observations are what the model read, off its own tokens; only the last one, which it did not read any more,
    is what the command printed. The function raises ValueError, naming the turn, where the tokens are not those
    of the chat; so does this one for history "retokenized", of which not all replies are kept.
    """
    if history == "retokenized":
        raise ValueError('history "retokenized" does not keep what was sampled')
    glue = _glue(chat, history)
    # Ids: the new text alone, whatever is spelt in it. Text: perhaps all of the prompt, but nobody else's tokens.
    part = str.partition if history == "tokens" else str.rpartition

    def opening(context: np.ndarray) -> tuple[str, str]:
        text = chat.decode(context)
        system, found, task = text.removeprefix(glue.before_system).partition(glue.before_task)
        if not found or not text.startswith(glue.before_system):
            raise ValueError("does not begin as the template does")
        return system, _without(task, glue.after_task)

    def observation(context: np.ndarray) -> str:
        _, found, text = part(chat.decode(context), glue.before_observation)
        if not found:
            raise ValueError("lacks the message that the template writes")
        return _without(text, glue.after_observation)

    def transcribe(chunks: Sequence[Trajectory]) -> Transcript:
        turns = [turn for chunk in chunks for turn in chunk.turns]
        i = 0
        try:
            system, task = opening(turns[0].context)
            exchanges = []
            for i, turn in enumerate(turns[1:], 1):
                read = observation(turn.context)
                exchanges.append(Exchange(chat.reply_text(turns[i - 1].sampled), read))
        except ValueError as error:
            raise ValueError(f"trial {chunks[0].trial}, turn {i}: its context {error}") from None
        last = turns[-1]
        printed = last.result.output if last.result else None
        exchanges.append(Exchange(chat.reply_text(last.sampled), printed))
        return Transcript(system, task, tuple(exchanges), chunks[0].resolved)

    return transcribe


def _glue(chat: Chat, history: Kind) -> Glue:
    system, task, reply, observation = MARKS
    if history == "tokens":
        opening = chat.decode(chat.opening(system, task))
        answer = chat.decode(chat.observation(observation, closed=False))
    else:
        nothing = Rendered("", np.zeros(0, np.int32))
        opening = chat.render(conversation(system, task, []), nothing).text
        turn = conversation(system, task, [(reply, observation)])
        answer = chat.render(turn, nothing).text.partition(reply)[2]
    before_system, rest = opening.split(system)
    before_task, after_task = rest.split(task)
    before_observation, after_observation = answer.split(observation)
    # How much of the reply's own end is new depends on the reply.
    start = max(before_observation.rfind(SPECIAL_TOKENS[1]), 0)
    return Glue(
        before_system, before_task, after_task, before_observation[start:], after_observation
    )


def _without(text: str, end: str) -> str:
    if not text.endswith(end):
        raise ValueError("does not end as the template does")
    return text.removesuffix(end)
