"""Messages to token ids, append-only: the stream of a trial only ever grows, and only new text is tokenised.

Special tokens are put in by id, and the text between them is encoded by a tokenizer that knows none of
them. So a file that holds "<|im_end|>" is read as ten harmless characters and cannot end a message. The
ids are those that the Qwen template (thinking disabled) gives for the same conversation.
"""

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")


class Chat:
    """Encodes the parts of a conversation. Never truncates; the cost is linear in the new text.

    Built from a `tokenizer.json` (tokenizers library) that knows the five Qwen tokens; raises ValueError
    naming the file and what it lacks.
    """

    def __init__(self, path: str | Path):
        data = json.loads(Path(path).read_text())
        data["truncation"] = data["padding"] = None
        self._all = Tokenizer.from_str(json.dumps(data))
        self._text = Tokenizer.from_str(json.dumps(data | {"added_tokens": []}))
        ids = [self._all.token_to_id(token) for token in SPECIAL_TOKENS]
        missing = [t for t, i in zip(SPECIAL_TOKENS, ids, strict=True) if i is None]
        if missing:
            raise ValueError(f"{path} lacks {' '.join(missing)}: a Qwen tokenizer is needed")
        self._end_of_text, self._start, self._end, think, end_think = ids
        self._added = np.fromiter(self._all.get_added_tokens_decoder(), np.int32)
        self._generation = self._join(
            self._end, "\n", self._start, "assistant\n", think, "\n\n", end_think, "\n\n"
        )

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
        system_ids = self._join(self._start, f"system\n{system}", self._end, "\n")
        return np.concatenate([system_ids, self._user(instruction)])

    def observation(self, text: str, closed: bool = True) -> np.ndarray:
        """i32[C]: what follows a reply, up to the next generation prompt.

        `closed`: the reply ended in <|im_end|>; otherwise it is closed here, as context.
        """
        glue = self._join("\n") if closed else self._join(self._end, "\n")
        return np.concatenate([glue, self._user(text)])

    def reply(self, text: str) -> np.ndarray:
        """i32[S]: a reply written by hand, closed by <|im_end|>."""
        return self._join(text, self._end)

    def decode(self, ids) -> str:
        """The text of ids, special tokens spelt out; bytes that are no UTF-8 become U+FFFD."""
        return self._all.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def encode(self, text: str) -> np.ndarray:
        """i32[*]: plain text, in which no special token is ever recognised."""
        ids = np.array(self._text.encode(text, add_special_tokens=False).ids, np.int32)
        if np.isin(ids, self._added).any():
            raise ValueError(f"the tokenizer's own model makes a special token of {text[:80]!r}")
        return ids

    def _user(self, text: str) -> np.ndarray:
        return np.concatenate([self._join(self._start, f"user\n{text}"), self._generation])

    def _join(self, *parts: int | str) -> np.ndarray:
        """Ids of special tokens, given by id, and of the text between them."""
        return np.concatenate(
            [np.array([p], np.int32) if isinstance(p, int) else self.encode(p) for p in parts]
        )
