"""A model's own chat template, and the proof that conversations can be appended to.

A template renders all messages anew; our streams only grow. `learn` takes a template apart into the
pieces around the messages, and `probe` renders growing conversations and compares token ids: a template
that rewrites what came before (Qwen3.5's drops the reasoning of past turns) is refused, with the first
token that differs. Where all is rendered anew each turn it need only render: `rehearse`.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import jinja2
import jinja2.meta
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment

MARKS = ("\ue000system\ue001", "\ue000user\ue001", "\ue000reply\ue001", "\ue000observation\ue001")
WINDOW = 8  # tokens shown around a difference
# What a probe's messages are made of: everything that templates strip, cut out, or parse.
TEXTS = (
    "ls -l",
    "  leading and trailing space \n",
    "two\n\nlines, a `quote` and {{ braces }}",
    "<think>\nwhy\n</think>\n\nhow",
    "naïve 日本 🙂",
    "<tool_call>\n<function=bash>\n</function>\n</tool_call>",
)


class TemplateError(ValueError):
    """A chat template that cannot be read, rendered or be appended to: one line."""


class Pieces(NamedTuple):
    """The fixed text around the messages, special tokens spelt out.

    A conversation is before_system, SYSTEM, before_user, USER, before_reply, then for each further turn
    REPLY, before_observation, OBSERVATION, before_reply.
    """

    before_system: str
    before_user: str
    before_observation: str
    before_reply: str


CHATML = Pieces(
    before_system="<|im_start|>system\n",
    before_user="<|im_end|>\n<|im_start|>user\n",
    before_observation="<|im_end|>\n<|im_start|>user\n",
    before_reply="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)


class Template:
    """A Jinja chat template as Hugging Face tokenizers carry it. Its text is untrusted: sandboxed."""

    def __init__(self, source: str):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda x, **k: json.dumps(x, **{"ensure_ascii": False} | k)
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except Exception as error:  # the fault of whoever wrote it, whatever it is
            raise TemplateError(f"the chat template cannot be parsed: {_line(error)}") from None
        for name in sorted(names):
            if name.endswith("_token"):
                raise TemplateError(
                    f"the chat template uses {name}: write the token itself into it"
                )

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """The text of a conversation up to the next reply, thinking disabled. Raises TemplateError."""
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=True, enable_thinking=False
            )
        except Exception as error:
            raise TemplateError(f"the chat template does not render: {_line(error)}") from None


def read_template(path: Path) -> Template:
    """From a .jinja file, or the "chat_template" of a tokenizer_config.json."""
    try:
        text = path.read_text()
        if path.suffix != ".json":
            return Template(text)
        found = json.loads(text)["chat_template"]
        if isinstance(found, list):  # several, by name
            found = next(t["template"] for t in found if t["name"] == "default")
    except (LookupError, StopIteration, TypeError):
        found = None
    except (OSError, ValueError) as error:
        raise TemplateError(f"chat template {path} cannot be read: {error}") from None
    if not isinstance(found, str):
        raise TemplateError(f"{path} has no chat_template")
    return Template(found)


def learn(template: Template) -> Pieces:
    """The pieces of a template, from one conversation of two turns. Raises TemplateError."""
    system, user, reply, observation = MARKS
    text = template.render(conversation(system, user, [(reply, observation)]))
    before_system, before_user, before_reply, before_observation, rest = _cut(text, MARKS)
    if rest != before_reply:
        raise TemplateError(
            "the chat template is not append-only: it writes the prompt of a reply as "
            f"{rest!r}, and later as {before_reply!r}; use the text-history path"
        )
    return Pieces(before_system, before_user, before_observation, before_reply)


def _cut(text: str, marks: Sequence[str]) -> list[str]:
    """What stands around the marks. Raises TemplateError where they do not stand in this order."""
    parts = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found:
            raise TemplateError(
                f"the chat template leaves out the {mark[1:-1]} message, or changes their order"
            )
        parts.append(before)
    return [*parts, text]


def rehearse(template: Template) -> None:
    """Renders growing conversations, as a trial whose history is text does.

    Raises TemplateError where that fails, or leaves out what the policy must know: the system message, the
    task, and the last turn.
    """
    system, user, reply, observation = MARKS
    turns = [(_numbered(reply, i), _numbered(observation, i)) for i in range(3)]
    for n in range(len(turns) + 1):
        text = template.render(conversation(system, user, turns[:n]))
        _cut(text, [system, user, *(turns[n - 1] if n else ())])
    for text in TEXTS:
        template.render(conversation(text, text, [(text, text)] * len(turns)))


def before_replies(template: Template, messages: Sequence[dict[str, str]]) -> list[str | None]:
    """What the template writes between each reply and the one before it; None for one that it leaves out."""
    marked = [
        m | {"content": _numbered(MARKS[2], i)} if m["role"] == "assistant" else m
        for i, m in enumerate(messages)
    ]
    rest, parts = template.render(marked), []
    for message in marked:
        if message["role"] == "assistant":
            before, found, after = rest.partition(message["content"])
            parts.append(before if found else None)
            rest = after if found else rest
    return parts


def _numbered(mark: str, i: int) -> str:
    return f"{mark[:-1]} {i + 1}{mark[-1]}"


def probe(template: Template, encode, append) -> None:
    """Compares what `append` builds with what the template renders, turn by turn, in token ids.

    encode(text) -> ids, special tokens recognised. append(system, user, turns) -> ids, turns being pairs of
    a reply and an observation. Raises TemplateError with the first difference.
    """
    # Each text is once a system message, a first message, a reply and an observation.
    pairs = [(TEXTS[i], TEXTS[-i]) for i in range(len(TEXTS))]
    cases = [(text, text, []) for text in TEXTS]
    cases += [(TEXTS[2], TEXTS[0], pairs[:turns]) for turns in range(1, len(pairs) + 1)]
    for system, user, turns in cases:
        rendered = np.asarray(encode(template.render(conversation(system, user, turns))))
        appended = np.asarray(append(system, user, turns))
        n = min(len(rendered), len(appended))
        differs = np.flatnonzero(rendered[:n] != appended[:n])
        if len(differs) or len(rendered) != len(appended):
            at = int(differs[0]) if len(differs) else n
            window = slice(max(0, at - WINDOW), at + WINDOW)
            raise TemplateError(
                f"the chat template is not append-only: after {len(turns)} turns token {at} differs, rendered "
                f"{rendered[window].tolist()}, appended {appended[window].tolist()}; use the text-history path"
            )


def conversation(system: str, user: str, turns: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    """Messages: the replies are the assistant's, the observations the user's."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    for reply, observation in turns:
        messages += said(reply, observation)
    return messages


def said(reply: str, observation: str) -> list[dict[str, str]]:
    """The messages of one turn."""
    return [
        {"role": "assistant", "content": reply},
        {"role": "user", "content": observation},
    ]


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _raise(message: str):
    raise jinja2.TemplateError(message)
