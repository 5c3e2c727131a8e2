"""Harnesses that keep text, through the real loop: what the sampler reads and what the trainer gets.

The template is the shipped one, which leaves out the thoughts of past replies as Qwen 3.5's does.
"""

import asyncio
import dataclasses
import itertools

import numpy as np
import pytest
from fakes import EPISODE, SUBMIT, TOKENIZER, bash, experts_of, generated, logprobs_of, need_sandbox

from t1jax.agent.action import SYSTEM
from t1jax.agent.chat import Chat
from t1jax.agent.episode import run_episode
from t1jax.agent.history import Said, make_history, retokenize
from t1jax.agent.stitch import count
from t1jax.agent.template import TemplateError, conversation
from t1jax.command import EXPECTED
from t1jax.sandbox.namespace import NamespaceSandbox
from t1jax.types import Sampled, digest

TEMPLATE = TOKENIZER.parent / "chat_template_drops.jinja"
KEEPS = (TOKENIZER.parent / "chat_template_keeps.jinja").read_text()
CONFIG = dataclasses.replace(EPISODE, history="stitched", max_context=2000)


@pytest.fixture(scope="module")
def chat():
    return Chat(TOKENIZER, TEMPLATE, appends=False)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    need_sandbox()
    return generated(tmp_path_factory.mktemp("tasks"), 1)[0][0]


def rendered(chat, messages) -> np.ndarray:
    """All of it encoded at once, whatever came before."""
    return np.array(chat.encode_rendered(chat._template.render(messages)), np.int32)


class Speaker:
    """A sampler that says given ids, whatever it reads; it keeps the prompts."""

    def __init__(self, said):
        self.said, self.prompts = said, []

    async def sample(self, trial, turn, tokens, experts_start, max_new) -> Sampled:
        self.prompts.append(tokens)
        ids, finish = self.said[turn][:max_new], "stop"
        if len(ids) < len(self.said[turn]):
            finish = "length"
        rows = experts_of(np.concatenate([tokens, ids]))[experts_start:]
        return Sampled(ids, logprobs_of(ids), rows, experts_start, finish, 7, 0.0, digest(ids))

    async def release(self, trial) -> None:
        pass


def spelt(chat, text: str) -> np.ndarray:
    """A reply in which every character is a token of its own, closed: no encoder would write it so."""
    ids = [chat.encode(character) for character in text]
    assert all(len(x) == 1 for x in ids)
    return np.concatenate([*ids, chat.reply("")])


def play(task, chat, said, **changes):
    speaker = Speaker(said)

    async def main():
        sandbox = await NamespaceSandbox.start(task, CONFIG.max_output_bytes)
        try:
            config = dataclasses.replace(CONFIG, **changes)
            return await run_episode(task, sandbox, speaker, chat, config, 5, 0, 1.0)
        finally:
            await sandbox.close()

    chunks = asyncio.run(main())
    for number, chunk in enumerate(chunks):
        chunk.check()
        assert chunk.chunk == number and chunk.trial == 5
    return chunks, speaker.prompts


def replies(chat, *texts):
    return [chat.reply(text) for text in texts]


def test_a_template_that_drops_thoughts_gives_one_stream_of_the_samplers_ids(chat, task):
    """Trap 2: each prompt begins otherwise than the last turn ended, and still an episode is one row."""
    said = replies(chat, bash("echo one"), bash("echo two"), SUBMIT)
    (chunk,), prompts = play(task, chat, said)
    thoughts = len(chat.encode_rendered("<think>\n\n</think>\n\n"))
    assert [(t.join, t.drop) for t in chunk.turns] == [
        ("split", (0, 0)),
        ("normalized", (thoughts, 0)),
        ("normalized", (thoughts, 0)),
    ]
    messages = conversation(
        SYSTEM["bash"], task.instruction, [(bash("echo one"), "one"), (bash("echo two"), "two")]
    )
    np.testing.assert_array_equal(prompts[2], rendered(chat, messages))
    assert chat.decode(prompts[2]).count("<think>") == 1
    for turn, ids in zip(chunk.turns, said, strict=True):
        np.testing.assert_array_equal(turn.sampled, ids)
        np.testing.assert_array_equal(turn.logprobs, logprobs_of(ids))
        assert chat.decode(turn.context).endswith("<think>\n\n</think>\n\n")
    audit = count([chunk])
    assert audit.joins == {"normalized": 2} and audit.drops == {(thoughts, 0): 2}
    assert audit.drifted == 0 and audit.sampled == sum(map(len, said))
    # The pass over the first prompt gave the first rows; the last pass gave the last ones.
    np.testing.assert_array_equal(
        chunk.experts[: len(prompts[0])], experts_of(np.append(prompts[0], 0))
    )
    last = experts_of(np.concatenate([prompts[2], said[2]]))
    np.testing.assert_array_equal(chunk.experts[-len(said[2]) :], last[-len(said[2]) :])


def test_other_ids_for_the_same_words_are_found(chat, task):
    """Trap 1: a reply whose encoding is not the one that its text would get; case 3."""
    said = [spelt(chat, bash("echo one")), *replies(chat, SUBMIT)]
    (chunk,), prompts = play(task, chat, said)
    assert chunk.turns[1].join == "retokenized"
    np.testing.assert_array_equal(chunk.turns[0].sampled, said[0])
    assert chat.decode(chunk.turns[1].context).startswith("\n<|im_start|>user\none<|im_end|>")
    assert len(prompts[1]) < len(prompts[0]) + len(said[0])
    assert count([chunk]).drifted == 0


def test_words_that_the_template_changes_open_a_chunk(chat, task):
    """Case 4: it strips what a reply began with, so the history is not what was said."""
    said = replies(chat, "\n\n" + bash("echo one"), bash("echo two"), SUBMIT)
    (first, second), prompts = play(task, chat, said)
    assert [t.join for t in first.turns] == ["split"]
    assert [t.join for t in second.turns] == ["split", "normalized"]
    np.testing.assert_array_equal(second.turns[0].context, prompts[1])
    assert (first.status, second.status) == ("submitted", "submitted")
    assert count([first, second]).joins == {"split": 1, "normalized": 1}


def test_a_summary_replaces_the_messages(chat, task):
    """A new chunk, though the template repeats all that the new conversation says of the old one."""
    limits = {"max_context": 900, "compact_below": 400, "max_reply": 100, "max_summary": 100}
    said = replies(chat, *[bash("seq 30")] * 12)
    chunks, prompts = play(task, chat, said, max_turns=12, **limits)
    assert len(chunks) > 2
    first, turns = chunks[0], 0
    for chunk in chunks:
        assert {t.join for t in chunk.turns[1:]} <= {"normalized"}
        np.testing.assert_array_equal(chunk.turns[0].context, prompts[turns])
        assert len(chunk.tokens) <= 900
        turns += len(chunk.turns)
    assert first.turns[-1].action == "summary"
    words = chat.decode(prompts[len(first.turns)])
    assert "Your summary of the work so far:\n```bash\nseq 30" in words
    assert words.count("<|im_start|>") == 3
    assert count(chunks).drifted == 0


@pytest.mark.parametrize("history", ["stitched", "retokenized"])
def test_the_context_limit_holds_for_prompts_and_for_the_stream(chat, task, history):
    """Thoughts that the template drops stay in the stream, which is the longer of the two."""
    said = replies(chat, *[bash("echo one")] * 8)
    (whole,), _ = play(task, chat, said, history=history)
    for limit in range(len(whole.turns[0].context) + 9, len(whole.tokens), 13):
        (chunk,), prompts = play(task, chat, said, max_context=limit, history=history)
        assert len(chunk.tokens) <= limit
        assert chunk.status in ("context_full", "length")
        assert max(map(len, prompts)) < limit
        assert 0 < len(chunk.turns) == len(prompts)


def test_retokenized_rows_are_the_last_prompt(chat, task):
    said = [spelt(chat, bash("echo one")), *replies(chat, bash("echo two"), SUBMIT)]
    (chunk,), prompts = play(task, chat, said, history="retokenized")
    np.testing.assert_array_equal(chunk.tokens, np.concatenate([prompts[2], said[2]]))
    np.testing.assert_array_equal(chunk.experts, experts_of(chunk.tokens))
    assert [t.join for t in chunk.turns] == ["split", "retokenized", "retokenized"]
    for turn, text in zip(chunk.turns, (bash("echo one"), bash("echo two"), SUBMIT), strict=True):
        np.testing.assert_array_equal(turn.sampled, chat.reply(text))
    np.testing.assert_array_equal(chunk.turns[1].logprobs, logprobs_of(said[1]))
    # The words are as probable as they were, however they are cut into tokens.
    assert chunk.turns[0].logprobs.sum() == pytest.approx(logprobs_of(said[0]).sum(), rel=1e-6)
    audit = count([chunk])
    assert audit.drifted == len(chunk.turns[0].sampled) > 0


def test_log_probs_are_shared_between_common_edges():
    """By hand: "ab|c|d" was said as "a|b|c|d", after a prompt "x"; then "e"."""
    texts = ["x", "a", "b", "c", "d", "ab", "cd", "e"]
    pieces = lambda ids: [texts[i] for i in ids]  # noqa: E731

    def said(context, ids, logprobs):
        return Said(np.array(context), np.array(ids), np.array(logprobs, np.float32))

    turns = [said([0], [1, 2, 6], [-1, -2, -4]), said([0], [7], [-8])]
    first, last = retokenize(np.array([0, 5, 3, 4, 0]), turns, ["x"], pieces)
    assert first.context.tolist() == [0] and first.sampled.tolist() == [5, 3, 4]
    assert first.logprobs.tolist() == [-3, -2, -2]
    assert last.context.tolist() == [0] and last.sampled.tolist() == [7]
    # Left out, behind other words, no more what it was, or not between edges of tokens.
    texts += ["da", "xa"]
    for prompt, before in (
        ([0, 1, 2, 6], None),
        ([0, 1, 2, 6], "e"),
        ([0, 4, 4, 0], "x"),
        ([9, 2, 6, 0], "x"),
        ([0, 1, 2, 3, 8], "x"),
    ):
        gone, last = retokenize(np.array(prompt), turns, [before], pieces)
        assert len(gone.context) == len(gone.sampled) == len(gone.logprobs) == 0
        assert last.context.tolist() == prompt


def test_equal_replies_stand_one_behind_the_other():
    """By hand: "a" and "a" again; what stands between them may hold the same word, or be of the first, too."""
    texts = ["x", "a", "y", "xa"]
    pieces = lambda ids: [texts[i] for i in ids]  # noqa: E731

    def places(prompt, before, *replies):
        turns = [Said(np.array([0]), np.array(r), np.full(len(r), -1.0)) for r in (*replies, [1])]
        out = retokenize(np.array(prompt), turns, before, pieces)
        assert [i for turn in out for part in turn[:2] for i in part] == [*prompt, 1]
        return [turn.sampled.tolist() for turn in out[:-1]], [len(turn.context) for turn in out]

    assert places([0, 1, 0, 1, 0], ["x", "x"], [1], [1]) == ([[1], [1]], [1, 1, 1])
    assert places([0, 1, 0, 1, 2, 1], ["x", "xay"], [1], [1]) == ([[1], [1]], [1, 3, 0])
    assert places([0, 1, 2, 1, 0], ["x", "y"], [1, 2], [1]) == ([[1, 2], [1]], [1, 0, 1])
    # The first is not what was said; the second is said once and counts once; so does one that is left out.
    assert places([0, 2, 0, 1, 0], ["x", "x"], [1], [1]) == ([[], [1]], [0, 3, 1])
    assert places([0, 1, 0], ["x", "x"], [1], [1]) == ([[1], []], [1, 0, 1])
    assert places([0, 1, 0, 1], ["x", None, "x"], [1], [1], [1]) == ([[1], [], [1]], [1, 0, 1, 0])


WORDS = ("ls", "ls ls", "ok", "ls\nok", " ok", "ok\n")
HEAD, END, THINK = "<|im_start|>{{ m.role }}", "<|im_end|>\n", "<think>\n\n</think>\n\n"
MESSAGE = HEAD + "\n{{ m.content }}" + END
TEMPLATES = {  # how a message is written
    "drops": MESSAGE,
    "trims": HEAD + "\n{{ m.content | trim }}" + END,
    "counts": "{{ messages | length if loop.first }}" + MESSAGE,
    "forgets": "{% if loop.index < 3 or loop.revindex < 5 %}" + MESSAGE + "{% endif %}",
    "repeats": MESSAGE * 2,
    "quotes": HEAD + " after {{ (loop.previtem or m).content | trim }}\n{{ m.content }}" + END,
}


def converse(history, chat, rng, count: int = 5):
    """Turns of few words, some of them spelt: how they joined, what was said, and the last prompt."""
    joins, turns = [], []
    for _ in range(count):
        prompt, words = history.prompt(), str(rng.choice(WORDS))
        ids = spelt(chat, words) if rng.random() < 0.3 else chat.reply(words)
        rows = experts_of(np.append(prompt, ids))[history.rows :]
        reply = Sampled(ids, logprobs_of(ids), rows, history.rows, "stop", 7, 0.0, digest(ids))
        joined = history.add(reply)
        joins.append(joined.join)
        turns.append(Said(joined.context, ids, reply.logprobs))
        history.observe(str(rng.choice(WORDS)), closed=True)
    return joins, turns, prompt


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", ["stitched", "retokenized"])
def test_every_template_gives_the_replies_in_their_places_or_not_at_all(name, kind, tmp_path):
    """Random trials in which replies, observations and the task are often the same."""
    path = tmp_path / "chat_template.jinja"
    body = "{% for m in messages %}" + TEMPLATES[name] + "{% endfor %}"
    path.write_text(body + "<|im_start|>assistant\n" + THINK)
    chat, rng, found = Chat(TOKENIZER, path, appends=False), np.random.default_rng(0), 0
    for _ in range(40):
        history = make_history(kind, chat, "ls", str(rng.choice(WORDS)))
        joins, turns, prompt = converse(history, chat, rng)
        out = history.rewrite(turns)
        begins = [i for i, join in enumerate(joins) if join == "split"]
        chunks = itertools.pairwise([*begins, len(turns)])
        for (first, last), experts in zip(chunks, history.experts(), strict=True):
            stream = np.concatenate([part for turn in out[first:last] for part in turn[:2]])
            assert len(experts) == len(stream) - 1
        if kind == "stitched":
            assert all(a.sampled is b.sampled for a, b in zip(out, turns, strict=True))
            continue
        np.testing.assert_array_equal(stream, np.append(prompt, turns[-1].sampled))
        at = 0
        for i, (turn, said) in enumerate(zip(out[:-1], turns, strict=False)):
            at += len(turn.context)
            if len(turn.sampled):
                assert chat.decode(turn.sampled) == chat.decode(said.sampled)
                assert turn.logprobs.sum() == pytest.approx(said.logprobs.sum(), rel=1e-5)
                *past, own = chat.decode(stream[:at]).split("<|im_start|>assistant")
                assert len(past) == i + 1 - (2 if name == "forgets" else 0)
                assert own == "\n" or name == "quotes"
                found += 1
            at += len(turn.sampled)
    # None is lost that the template leaves as it was.
    least = {"drops": 160, "counts": 160, "forgets": 80, "quotes": 40, "trims": 80}
    assert kind == "stitched" or found >= least.get(name, 0)


def test_a_template_that_fails_in_a_run_is_one_line_and_names_the_trial(chat, task, tmp_path):
    path = tmp_path / "chat_template.jinja"
    for fault in (
        "{{ raise_exception('too\nmany') }}",
        "{{ 1 / 0 }}",
        "{{ messages[99].content }}",
    ):
        path.write_text("{% if messages | length > 8 %}" + fault + "{% endif %}" + KEEPS)
        with pytest.raises(
            TemplateError, match="trial 5, turn 4: the chat template does not "
        ) as e:
            play(task, Chat(TOKENIZER, path, appends=False), replies(chat, *[bash("ls")] * 6))
        assert "\n" not in str(e.value)
    path.write_text("{% if messages | length < 9 %}" + KEEPS + "{% endif %}")
    with pytest.raises(TemplateError, match="turn 4: the chat template renders 10 messages as no"):
        play(task, Chat(TOKENIZER, path, appends=False), replies(chat, *[bash("ls")] * 6))
    assert TemplateError in EXPECTED


def test_a_template_that_forgets_in_a_run_opens_a_chunk_each_turn(chat, task, tmp_path):
    """Whatever it does behind the turns that are tried at the start."""
    path = tmp_path / "chat_template.jinja"
    path.write_text("{% if messages | length > 8 %}<|im_start|>{% else %}" + KEEPS + "{% endif %}")
    said = replies(chat, *[bash("ls")] * 6, SUBMIT)
    chunks, prompts = play(task, Chat(TOKENIZER, path, appends=False), said)
    assert [len(chunk.turns) for chunk in chunks] == [4, 1, 1, 1] and len(prompts[-1]) == 1


def test_words_of_the_user_are_not_taken_for_the_reply(chat, task):
    """The reply stands behind what its own prompt shares with the next, not where it was quoted before."""
    quoted = dataclasses.replace(task, instruction=f"Run it: {SUBMIT}\n{bash('ls -l')}")
    said = [spelt(chat, bash("ls -l")), *replies(chat, SUBMIT)]
    (chunk,), _ = play(quoted, chat, said, history="retokenized")
    assert "Run it" in chat.decode(chunk.turns[0].context)
    assert chat.decode(chunk.turns[0].context).endswith("assistant\n")
    np.testing.assert_array_equal(chunk.turns[0].sampled, chat.reply(bash("ls -l")))


def test_an_end_that_came_back_as_other_ids_is_not_read_twice(chat, task):
    head, tail = chat.encode("```bash\necho hello"), spelt(chat, "file\n```")
    said = [np.concatenate([head, tail]), *replies(chat, SUBMIT)]
    (chunk,), _ = play(task, chat, said)
    assert chunk.turns[1].join == "normalized" and chunk.turns[1].drop[1] > 0
    assert chat.decode(chunk.turns[1].context).startswith("\n<|im_start|>user\n")


def test_only_new_text_is_encoded(chat, task, monkeypatch):
    """Trap 22: the ids are those of the whole text encoded at once, the work is that of the new text."""
    encoded = []
    encode = chat.encode_rendered
    said = replies(chat, *[bash(f"echo {i} | tr 1 2") for i in range(40)])
    monkeypatch.setattr(chat, "encode_rendered", lambda text: encoded.append(text) or encode(text))
    for history in ("stitched", "retokenized"):
        encoded.clear()
        chunks, prompts = play(task, chat, said, history=history, max_turns=40, max_context=10_000)
        assert len(chunks) == 1 and len(prompts) == 40
        new = len(chat.decode(prompts[-1]))
        repeated = 40 * len("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
        assert sum(map(len, encoded)) <= 1.1 * new + repeated
        whole = chat.decode(prompts[-1])
        np.testing.assert_array_equal(prompts[-1], encode(whole))
