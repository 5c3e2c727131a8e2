"""Messages to token ids, append-only: the stream of a trial only ever grows, and only new text is tokenised.

Special tokens are put in by id, and the text between them is encoded by a tokenizer that knows none of
them. So a file that holds "<|im_end|>" is read as ten harmless characters and cannot end a message. The
fixed text around the messages is ChatML as Qwen writes it (thinking disabled), or that of a model's own
chat template, which is then proven to be append-only. A template that is not can only be rendered anew each
turn (`render`; see agent/history.py).
"""

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from t1jax.agent.template import (
    CHATML,
    TemplateError,
    before_replies,
    learn,
    probe,
    read_template,
    rehearse,
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")


def _byte_characters() -> dict[str, str]:
    """How byte-level tokenizers write a byte (GPT-2): printable ones as they are, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    written = {chr(b): chr(b) for b in printable}
    return written | {chr(0x100 + i): chr(b) for i, b in enumerate(others)}


BYTES = _byte_characters()


class Rendered(NamedTuple):
    """A conversation as text, and its ids i32[N]."""

    text: str
    ids: np.ndarray


class Chat:
    """Encodes the parts of a conversation. Never truncates; the cost is linear in the new text.

    Built from a `tokenizer.json` (tokenizers library) that knows the five Qwen tokens, and optionally a
    chat template (see template.read_template). Raises ValueError naming the file and what it lacks, or
    TemplateError where the template rewrites what came before. One that is only to be rendered (`appends`
    False) may do so, but must render.
    """

    def __init__(self, path: str | Path, template: str | Path | None = None, appends: bool = True):
        data = json.loads(Path(path).read_text())
        data["truncation"] = data["padding"] = None
        self._all = Tokenizer.from_str(json.dumps(data))
        self._text = Tokenizer.from_str(json.dumps(data | {"added_tokens": []}))
        ids = [self._all.token_to_id(token) for token in SPECIAL_TOKENS]
        missing = [t for t, i in zip(SPECIAL_TOKENS, ids, strict=True) if i is None]
        if missing:
            raise ValueError(f"{path} lacks {' '.join(missing)}: a Qwen tokenizer is needed")
        self._end_of_text, _, self._end, _, _ = ids
        added = self._all.get_added_tokens_decoder()
        self._added = np.fromiter(added, np.int32)
        self._specials = {token.content: i for i, token in added.items()}
        source = self._template = read_template(Path(template)) if template else None
        if not appends:
            return rehearse(source)
        pieces = learn(source) if source else CHATML
        self._system, self._user, self._observation, self._reply = map(self._split, pieces)
        if self._observation[:1] != [self._end]:
            raise TemplateError("the chat template does not end a reply with <|im_end|>")
        if source:
            probe(source, self.encode_rendered, self._append_all)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return 1 + max(self._all.get_vocab().values())

    @property
    def stop_ids(self) -> tuple[int, int]:
        """The ids that end a reply: <|im_end|> and <|endoftext|>."""
        return self._end, self._end_of_text

    def opening(self, system: str, instruction: str) -> np.ndarray:
        """i32[C]: system and first user message, ending in the generation prompt."""
        return self._join(*self._system, system, *self._user, instruction, *self._reply)

    def observation(self, text: str, closed: bool = True) -> np.ndarray:
        """i32[C]: what follows a reply, up to the next generation prompt.

        `closed`: the reply ended in <|im_end|>; otherwise it is closed here, as context.
        """
        glue = self._observation[1:] if closed else self._observation
        return self._join(*glue, text, *self._reply)

    def reply(self, text: str) -> np.ndarray:
        """i32[S]: a reply written by hand, closed by <|im_end|>."""
        return self._join(text, self._end)

    def render(self, messages: Sequence[dict[str, str]], before: Rendered) -> Rendered:
        """A whole conversation as the template writes it, up to the next reply.

        before: what was rendered last, of which the ids are kept up to where the texts part. Raises
        TemplateError.
        """
        text = self._template.render(messages)
        if not text:
            raise TemplateError(f"the chat template renders {len(messages)} messages as nothing")
        n, end = _common(text, before.text), SPECIAL_TOKENS[2]
        cut = text.rfind(end, 0, n)
        if cut < 0:
            return Rendered(text, np.array(self.encode_rendered(text), np.int32))
        # A special token parts the text: what stands before it is encoded as it was.
        kept = np.flatnonzero(before.ids == self._end)[text.count(end, 0, cut)]
        ids = self.encode_rendered(text[cut:])
        return Rendered(text, np.concatenate([before.ids[:kept], np.array(ids, np.int32)]))

    def before_replies(self, messages: Sequence[dict[str, str]]) -> list[str | None]:
        """See template.before_replies; spelt as by `pieces`."""
        normalizer = self._all.normalizer
        spelt = normalizer.normalize_str if normalizer else str
        return [
            text if text is None else spelt(text).encode().decode("latin-1")
            for text in before_replies(self._template, messages)
        ]

    def harmless(self, text: str) -> str:
        """The text with special tokens broken up, so that a rendering has none but its own."""
        names = "|".join(map(re.escape, self._specials))
        return re.sub(names, lambda found: f"{found[0][0]} {found[0][1:]}", text)

    def reply_text(self, ids: np.ndarray) -> str:
        """What a sampled reply says, without the id that ended it."""
        stopped = len(ids) > 0 and ids[-1] in self.stop_ids
        return self.decode(ids[:-1] if stopped else ids)

    def quote(self, ids: np.ndarray) -> str:
        """As `reply_text`, for a message: special tokens that are only spelt out are broken up."""
        stopped = len(ids) > 0 and ids[-1] in self.stop_ids
        ids = ids[:-1] if stopped else ids
        cuts = np.flatnonzero(np.diff(np.isin(ids, self._added), prepend=False))
        runs = np.split(ids, cuts)
        return "".join(
            self.decode(run) if np.isin(run, self._added).any() else self.harmless(self.decode(run))
            for run in runs
        )

    def pieces(self, ids: np.ndarray) -> list[str]:
        """The bytes of each id as text of as many characters (latin-1): joined, the bytes of all."""
        return [self._bytes.get(i, "") for i in ids.tolist()]  # a model may have ids to spare

    @functools.cached_property
    def _bytes(self) -> dict[int, str]:
        """The bytes of every id. A byte-level tokenizer writes them as the characters of BYTES."""
        vocabulary = self._text.get_vocab(with_added_tokens=False)
        out = {i: "".join(map(BYTES.__getitem__, token)) for token, i in vocabulary.items()}
        return out | {i: token.encode().decode("latin-1") for token, i in self._specials.items()}

    def decode(self, ids) -> str:
        """The text of ids, special tokens spelt out; bytes that are no UTF-8 become U+FFFD."""
        return self._all.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def encode(self, text: str) -> np.ndarray:
        """i32[*]: plain text, in which no special token is ever recognised."""
        ids = np.array(self._text.encode(text, add_special_tokens=False).ids, np.int32)
        if np.isin(ids, self._added).any():
            raise ValueError(f"the tokenizer's own model makes a special token of {text[:80]!r}")
        return ids

    def _split(self, piece: str) -> list[int | str]:
        """A template's own text as ids of special tokens and plain text between them."""
        names = sorted(self._specials, key=len, reverse=True)
        parts = re.split("(" + "|".join(map(re.escape, names)) + ")", piece)
        return [self._specials.get(part, part) for part in parts if part]

    def _join(self, *parts: int | str) -> np.ndarray:
        """Ids of special tokens, given by id, and of the text between them, encoded in one go."""
        ids, text = [np.zeros(0, np.int32)], ""
        for part in (*parts, None):
            if isinstance(part, str):
                text += part
                continue
            if text:
                ids.append(self.encode(text))
                text = ""
            if part is not None:
                ids.append(np.array([part], np.int32))
        return np.concatenate(ids)

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of rendered text, special tokens recognised."""
        return self._all.encode(text, add_special_tokens=False).ids

    def _append_all(self, system: str, user: str, turns) -> np.ndarray:
        """A whole conversation as a trial would build it; special tokens in it recognised, as rendered."""
        ids = [self._join(*self._system, *self._split(system), *self._user, *self._split(user))]
        ids.append(self._join(*self._reply))
        for reply, observation in turns:
            ids.append(self._join(*self._split(reply), self._end))
            ids.append(self._join(*self._observation[1:], *self._split(observation), *self._reply))
        return np.concatenate(ids)


def _common(a: str, b: str) -> int:
    """How many characters both begin with."""
    n = min(len(a), len(b))
    left, right = (np.frombuffer(x[:n].encode("utf-32-le", "surrogatepass"), "<u4") for x in (a, b))
    return int(np.argmin(np.append(left == right, False)))
