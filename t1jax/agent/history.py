"""What of a trial the sampler reads next, and which ids the trainer gets: three kinds of history.

tokens        ids are the truth: encoded or sampled once, then only appended to. The way to train
stitched      text is the truth, as in harnesses that keep messages: the model's chat template renders all of
              it anew each turn, and agent/stitch.py joins the prompts around the sampler's own ids
retokenized   the same prompts, but the trainer gets the last one as it was encoded: its ids are no longer
              those that were sampled. For the study of what that costs (configs/ablation_gap.py)
"""

from typing import Literal, NamedTuple, Protocol

import numpy as np

from t1jax.agent.chat import Chat, Rendered
from t1jax.agent.stitch import Pieces, Stitcher, text_edges
from t1jax.agent.template import conversation, said
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
    """A trial in the order: prompt, add, observe, prompt ...; what was observed may be replaced until `add`."""

    rows: int  # of experts held, which the sampler need not send again
    length: int  # of the stream that is to be trained on, with the open prompt

    def prompt(self) -> np.ndarray:
        """i32[N]: what the sampler is to continue. Raises TemplateError where it cannot be rendered."""

    def add(self, reply: Sampled) -> Joined:
        """Takes the reply to the prompt. Raises ValueError unless its experts join exactly."""

    def observe(self, text: str, closed: bool) -> None:
        """What the sandbox answered; `closed`: the reply ended in the template's own token."""

    def reopen(self, instruction: str) -> None:
        """Begins a new chunk: the system message and this one are all that the sampler reads from here on."""

    def experts(self) -> list[np.ndarray]:
        """[N-1, L, K] of each chunk; a chunk begins with each turn whose join is "split"."""

    def rewrite(self, turns: list[Said]) -> list[Said]:
        """What the trainer gets of the turns."""


def make_history(kind: Kind, chat: Chat, system: str, instruction: str) -> History:
    if kind == "tokens":
        return TokenHistory(chat, system, instruction)
    kinds = {"stitched": StitchedHistory, "retokenized": RetokenizedHistory}
    return kinds[kind](chat, system, instruction)


class TokenHistory:
    """A stream of ids that only grows; another one where it is reopened."""

    def __init__(self, chat: Chat, system: str, instruction: str):
        self._chat, self._system = chat, system
        self._experts: list[list[np.ndarray]] = []  # parts of [N-1, L, K], by chunk
        self.reopen(instruction)

    def reopen(self, instruction: str) -> None:
        self.rows = 0
        self._tokens = np.zeros(0, np.int32)
        self._context = self._chat.opening(self._system, instruction)

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
        join = "strict" if len(self._tokens) else "split"
        if join == "split":
            self._experts.append([])
        self._experts[-1].append(reply.experts[self.rows - start :])
        self._tokens = np.concatenate([self._tokens, context, reply.ids])
        self._context, self.rows = context[:0], end
        return Joined(context, join)

    def observe(self, text: str, closed: bool) -> None:
        self._context = self._chat.observation(text, closed)

    def experts(self) -> list[np.ndarray]:
        return [np.concatenate(parts) for parts in self._experts]

    def rewrite(self, turns: list[Said]) -> list[Said]:
        return turns


class TextHistory:
    """Messages, rendered and encoded anew each turn."""

    def __init__(self, chat: Chat, system: str, instruction: str):
        self._chat, self._system = chat, system
        self._rendered = Rendered("", np.zeros(0, np.int32))
        self.reopen(instruction)

    def reopen(self, instruction: str) -> None:
        system, user = self._chat.harmless(self._system), self._chat.harmless(instruction)
        self._messages = conversation(system, user, [])
        self._reply, self._before = "", len(self._messages)

    def _render(self) -> np.ndarray:
        self._rendered = self._chat.render(self._messages, self._rendered)
        return self._rendered.ids

    def _replied(self, ids: np.ndarray) -> None:
        self._reply, self._before = self._chat.quote(ids), len(self._messages)

    def observe(self, text: str, closed: bool) -> None:
        self._messages[self._before :] = said(self._reply, self._chat.harmless(text))


class StitchedHistory(TextHistory):
    """Prompts joined around the sampler's own ids; a chunk for each that cannot be joined."""

    def __init__(self, chat: Chat, system: str, instruction: str):
        self._stitcher = Stitcher(chat.pieces)
        super().__init__(chat, system, instruction)

    @property
    def rows(self) -> int:
        return self._stitcher.rows

    @property
    def length(self) -> int:
        return self._stitcher.length

    def reopen(self, instruction: str) -> None:
        super().reopen(instruction)
        self._stitcher.split()

    def prompt(self) -> np.ndarray:
        prompt = self._render()
        self._join = self._stitcher.read(prompt)
        return prompt

    def add(self, reply: Sampled) -> Joined:
        self._stitcher.add(reply.ids, reply.experts, reply.experts_start)
        self._replied(reply.ids)
        context = self._rendered.ids[self._join.resume :]
        return Joined(context, self._join.case, self._join.drop)

    def experts(self) -> list[np.ndarray]:
        return self._stitcher.experts()

    def rewrite(self, turns: list[Said]) -> list[Said]:
        return turns


class RetokenizedHistory(TextHistory):
    """Keeps the last prompt and its reply, with the experts of the pass that read them: one chunk."""

    rows = 0

    def __init__(self, chat: Chat, system: str, instruction: str):
        super().__init__(chat, system, instruction)
        self._last: tuple[np.ndarray, Sampled, int] | None = None  # prompt, reply, messages so far

    @property
    def length(self) -> int:
        return len(self._rendered.ids)

    def prompt(self) -> np.ndarray:
        return self._render()

    def add(self, reply: Sampled) -> Joined:
        rows = len(self._rendered.ids) + len(reply.ids) - 1
        if reply.experts_start or len(reply.experts) != rows:
            raise ValueError(f"the sampler returned {len(reply.experts)} rows of experts of {rows}")
        join = "retokenized" if self._last else "split"
        self._last = self._rendered.ids, reply, len(self._messages)
        self._replied(reply.ids)
        return Joined(reply.ids[:0], join)  # `rewrite` tells them apart

    def experts(self) -> list[np.ndarray]:
        return [self._last[1].experts]

    def rewrite(self, turns: list[Said]) -> list[Said]:
        prompt, _, messages = self._last
        before = self._chat.before_replies(self._messages[:messages])
        return retokenize(prompt, turns, before, self._chat.pieces)


def retokenize(
    prompt: np.ndarray,
    turns: list[Said],
    before: list[str | None],
    pieces: Pieces,
) -> list[Said]:
    """The turns as the last prompt i32[N] holds them; the last reply, which follows it, is kept as it is.

    before: what the template wrote between each reply but the last and the one before it, as pieces spell it;
    None for a reply that it left out. Behind that, and behind the reply before it, a reply must stand word by
    word, or its turn has no ids: the same words elsewhere may have been said by others. Its log-prob is known
    where its tokens and those of the prompt have the same edges; between two such edges it is shared alike by
    the prompt's tokens.
    """
    edges, text = text_edges(pieces(prompt)), "".join(pieces(prompt))
    out, done, begin = [], 0, 0  # done: ids of the prompt; begin: of the last reply found
    for turn, glue in zip(turns[:-1], before, strict=True):
        words = pieces(turn.sampled)
        # The end of a reply may be the template's, too: it is not skipped.
        found = -1 if glue is None else text.find(glue, begin)
        begin = begin if found < 0 else found + len(glue)
        end = begin + len("".join(words))
        stands = found >= 0 and edges[done] <= begin < end and text[begin:end] == "".join(words)
        if not stands or not np.isin((begin, end), edges).all():
            out.append(Said(prompt[:0], prompt[:0], turn.logprobs[:0]))
            continue
        first, last = np.searchsorted(edges, [begin, end])
        theirs = begin + text_edges(words)
        cuts = np.intersect1d(theirs, edges[first : last + 1])
        span = np.searchsorted(cuts, edges[first:last], "right") - 1
        total = np.zeros(len(cuts), np.float64)
        np.add.at(total, np.searchsorted(cuts, theirs[:-1], "right") - 1, turn.logprobs)
        logprobs = (total / np.maximum(np.bincount(span, minlength=len(cuts)), 1))[span]
        out.append(Said(prompt[done:first], prompt[first:last], logprobs.astype(np.float32)))
        done = last
    return [*out, Said(prompt[done:], turns[-1].sampled, turns[-1].logprobs)]
