"""What of a trial the sampler reads next, and which ids the trainer gets: three kinds of history.

tokens        ids are the truth: encoded or sampled once, then only appended to. The way to train
stitched      text is the truth, as in harnesses that keep messages: the model's chat template renders all of
              it anew each turn, and agent/stitch.py joins the prompts around the sampler's own ids
retokenized   the same prompts, but the trainer gets the last one as it was encoded: its ids are no longer
              those that were sampled. For the study of what that costs (configs/ablation_gap.py)
"""

from typing import Literal, NamedTuple, Protocol

import numpy as np

from t1jax.agent.chat import Chat
from t1jax.agent.stitch import Pieces, Stitcher
from t1jax.agent.template import conversation
from t1jax.types import Join, Sampled

Kind = Literal["tokens", "stitched", "retokenized"]


class Joined(NamedTuple):
    """How a turn joins the stream: its context i32[C], and see types.Turn."""

    context: np.ndarray
    join: Join
    drop: tuple[int, int] = (0, 0)


class Said(NamedTuple):
    """One turn of a stream as the trainer gets it: context i32[C], sampled i32[S], logprobs f32[S]."""

    context: np.ndarray
    sampled: np.ndarray
    logprobs: np.ndarray


class History(Protocol):
    """A trial in the order: prompt, add, observe, prompt ..."""

    rows: int  # of experts held, which the sampler need not send again
    length: int  # of the stream that is to be trained on, with the open prompt

    def prompt(self) -> np.ndarray:
        """i32[N]: what the sampler is to continue."""

    def add(self, reply: Sampled) -> Joined:
        """Takes the reply to the prompt. Raises ValueError unless its experts join exactly."""

    def observe(self, text: str, closed: bool) -> None:
        """What the sandbox answered; `closed`: the reply ended in the template's own token."""

    def experts(self) -> list[np.ndarray]:
        """[N-1, L, K] of each chunk; a chunk begins with each turn whose join is "split"."""

    def rewrite(self, said: list[Said]) -> list[Said]:
        """What the trainer gets of the turns."""


def make_history(kind: Kind, chat: Chat, system: str, instruction: str) -> History:
    if kind == "tokens":
        return TokenHistory(chat, system, instruction)
    return {"stitched": TextHistory, "retokenized": RetokenizedHistory}[kind](
        chat, system, instruction
    )


class TokenHistory:
    """One stream of ids that only grows."""

    def __init__(self, chat: Chat, system: str, instruction: str):
        self.rows = 0
        self._chat = chat
        self._tokens, self._context = np.zeros(0, np.int32), chat.opening(system, instruction)
        self._experts: list[np.ndarray] = []

    @property
    def length(self) -> int:
        return len(self._tokens) + len(self._context)

    def prompt(self) -> np.ndarray:
        return np.concatenate([self._tokens, self._context])

    def add(self, reply: Sampled) -> Joined:
        """A sampler may return rows that are held already (from `experts_start` on); those are dropped."""
        context, start = self._context, reply.experts_start
        end = self.length + len(reply.ids) - 1
        if not 0 <= start <= self.rows or start + len(reply.experts) != end:
            raise ValueError(
                f"the sampler returned experts of tokens [{start}, {start + len(reply.experts)}), "
                f"needed are [{self.rows}, {end})"
            )
        self._experts.append(reply.experts[self.rows - start :])
        self._tokens = np.concatenate([self._tokens, context, reply.ids])
        self._context, first, self.rows = context[:0], len(self._experts) == 1, end
        return Joined(context, "split" if first else "strict")

    def observe(self, text: str, closed: bool) -> None:
        self._context = self._chat.observation(text, closed)

    def experts(self) -> list[np.ndarray]:
        return [np.concatenate(self._experts)]

    def rewrite(self, said: list[Said]) -> list[Said]:
        return said


class TextHistory:
    """Messages, rendered and encoded anew each turn."""

    rows = 0

    def __init__(self, chat: Chat, system: str, instruction: str):
        self._chat, self._system, self._instruction = chat, system, instruction
        self._turns: list[tuple[str, str]] = []
        self._reply = ""
        self._stitcher = Stitcher(chat.pieces)

    @property
    def length(self) -> int:
        return self._stitcher.length

    def prompt(self) -> np.ndarray:
        messages = conversation(self._system, self._instruction, self._turns)
        self._prompt = self._chat.render(messages)
        self._join = self._stitcher.read(self._prompt)
        return self._prompt

    def add(self, reply: Sampled) -> Joined:
        if reply.experts_start:
            raise ValueError(f"the sampler left out {reply.experts_start} rows of experts")
        self._stitcher.add(reply.ids, reply.experts)
        self._reply = self._chat.reply_text(reply.ids)
        return Joined(self._prompt[self._join.resume :], self._join.case, self._join.drop)

    def observe(self, text: str, closed: bool) -> None:
        self._turns.append((self._reply, text))

    def experts(self) -> list[np.ndarray]:
        return self._stitcher.experts()

    def rewrite(self, said: list[Said]) -> list[Said]:
        return said


class RetokenizedHistory(TextHistory):
    """Keeps the last prompt and its reply, with the experts of the pass that read them: one chunk."""

    @property
    def length(self) -> int:
        return len(self._prompt)

    def add(self, reply: Sampled) -> Joined:
        first = not self._turns
        context, _, _ = super().add(reply)
        self._last, self._experts = self._prompt, reply.experts
        return Joined(context, "split" if first else "retokenized")

    def experts(self) -> list[np.ndarray]:
        return [self._experts]

    def rewrite(self, said: list[Said]) -> list[Said]:
        return retokenize(self._last, said, self._chat.pieces)


def retokenize(prompt: np.ndarray, said: list[Said], pieces: Pieces) -> list[Said]:
    """The turns as the last prompt i32[N] holds them; the last reply, which follows it, is kept as it is.

    A reply's log-prob is known where its tokens and those of the prompt have the same edges; between two
    such edges it is shared alike by the prompt's tokens. A reply whose text the prompt has no more is none
    of its turn's ids.
    """
    edges = _edges(pieces(prompt))
    text = "".join(pieces(prompt))
    out, done, at = [], 0, 0
    for turn in said[:-1]:
        words = pieces(turn.sampled)
        begin = text.find("".join(words), at)
        if begin < 0:
            out.append(Said(prompt[:0], prompt[:0], turn.logprobs[:0]))
            continue
        at = begin + len("".join(words))
        first, last = np.searchsorted(edges, [begin, at])
        theirs = begin + _edges(words)
        cuts = np.intersect1d(theirs, np.append(edges[first : last + 1], [begin, at]))
        span = np.searchsorted(cuts, edges[first:last], "right") - 1
        total = np.zeros(len(cuts), np.float64)
        np.add.at(total, np.searchsorted(cuts, theirs[:-1], "right") - 1, turn.logprobs)
        logprobs = (total / np.maximum(np.bincount(span, minlength=len(cuts)), 1))[span]
        out.append(Said(prompt[done:first], prompt[first:last], logprobs.astype(np.float32)))
        done = last
    return [*out, Said(prompt[done:], said[-1].sampled, said[-1].logprobs)]


def _edges(words: list[str]) -> np.ndarray:
    """i64[n + 1]: where each of n pieces of text begins, and where the last one ends."""
    return np.cumsum([0, *map(len, words)])
