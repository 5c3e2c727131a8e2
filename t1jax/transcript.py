"""What was said in a trial, as text."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from t1jax.agent.chat import SPECIAL_TOKENS, Chat, Rendered
from t1jax.agent.history import Kind
from t1jax.agent.template import MARKS, conversation
from t1jax.types import Trajectory, Turn

SUMMARY = "summary"  # the action of a turn that ends a chunk: the next one opens with what it says


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A reply of the model, and what followed it; None where nothing did.

    copied: it was said in another stream, and stands here as context.
    """

    reply: str
    observation: str | None
    copied: bool = False


@dataclasses.dataclass(frozen=True)
class Transcript:
    """What one stream holds. system: None where none is known. resolved: the outcome, None where not known."""

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


def make_transcribe(
    chat: Chat, history: Kind
) -> Callable[[Sequence[Trajectory]], list[Transcript]]:
    """A function of the chunks of a trial with at least one turn, in order: a transcript for each.

    A chunk whose prompt was rendered anew repeats what was said before it; one behind a summary does not. What
    followed a reply is what the model read, off its own tokens; only where it read nothing more, it is what the command
    printed. The function raises ValueError, naming the turn, where the tokens are not those of the chat; so does
    this one for history "retokenized", of which not all replies are kept.
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

    def exchange(turn: Turn, after: Turn | None, copied: bool) -> Exchange:
        printed = turn.result.output if turn.result else None
        heard = observation(after.context) if after else printed
        return Exchange(chat.reply_text(turn.sampled), heard, copied)

    def transcribe(chunks: Sequence[Trajectory]) -> list[Transcript]:
        out = []
        turns = [turn for chunk in chunks for turn in chunk.turns]
        begin = end = 0  # of what the chunk's stream repeats and says, in turns
        for chunk in chunks:
            if end and turns[end - 1].action == SUMMARY:
                begin = end
            here, end = end, end + len(chunk.turns)
            exchanges, i = [], begin
            try:
                system, task = opening(turns[begin].context)
                for i in range(begin, end):
                    last = i + 1 == len(turns) or turns[i].action == SUMMARY
                    after = None if last else turns[i + 1]
                    exchanges.append(exchange(turns[i], after, copied=i < here))
            except ValueError as error:
                place = f"trial {chunk.trial}, turn {i}"
                raise ValueError(f"{place}: a message around it {error}") from None
            out.append(Transcript(system, task, tuple(exchanges), chunk.resolved))
        return out

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
