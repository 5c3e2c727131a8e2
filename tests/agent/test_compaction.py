"""Summaries: when they are asked for, what they cost, what the next chunk knows, and what refuses to run."""

import dataclasses

import numpy as np
import pytest
from fakes import EPISODE, SUBMIT, TOKENIZER, bash, generated, need_sandbox, run_script, terminus

from t1jax.agent.action import SYSTEM
from t1jax.agent.chat import Chat
from t1jax.agent.episode import opening, summary_request
from t1jax.agent.stitch import count
from t1jax.types import SamplerError

CONFIG = dataclasses.replace(
    EPISODE, max_turns=30, max_context=1600, max_reply=120, compact_below=700, max_summary=150
)
ECHO = bash("seq 60")
TEMPLATE = TOKENIZER.parent / "chat_template_keeps.jinja"


@pytest.fixture(scope="module")
def chat():
    return Chat(TOKENIZER)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    need_sandbox()
    return generated(tmp_path_factory.mktemp("tasks"), 1)[0][0]


def play(task, chat, script, **changes):
    return run_script(task, chat, script, dataclasses.replace(CONFIG, **changes))


def until_asked(task, chat, reply=ECHO, **changes) -> int:
    """How many turns come before the first summary is asked for."""
    chunks, _ = play(task, chat, [reply] * 30, **changes)
    return [turn.action for chunk in chunks for turn in chunk.turns].index("summary")


def test_a_summary_ends_its_chunk_and_opens_the_next(chat, task):
    n = until_asked(task, chat)
    script = [ECHO] * n + ["I counted to sixty.", bash("echo on"), SUBMIT]
    (first, second), sampler = play(task, chat, script)
    assert [t.action for t in first.turns] == ["command"] * n + ["summary"]
    assert [t.action for t in second.turns] == ["command", "submit"]
    assert {c.status for c in (first, second)} == {"submitted"}
    # It is asked in place of what came of the last turn, and trained on like any reply.
    asked = first.turns[-1]
    np.testing.assert_array_equal(asked.context, chat.observation(summary_request(150)))
    np.testing.assert_array_equal(asked.sampled, chat.reply("I counted to sixty."))
    assert asked.finish == "stop" and asked.command is None and asked.drifted == 0
    assert first.sampled.sum() == sum(len(t.sampled) for t in first.turns)
    # No sooner than needed, and with room for all of it.
    calls = sampler.calls
    last = np.concatenate([chat.observation("ok"), calls[n - 1].tokens])
    assert CONFIG.max_context - len(last) >= CONFIG.compact_below
    assert calls[n].max_new == CONFIG.max_summary
    # The next chunk knows the task, the summary and the last output; nothing else, and no experts are held.
    numbers = "\n".join(map(str, range(1, 61)))
    message = opening(
        task.instruction, f"Output of the last command:\n{numbers}", "I counted to sixty."
    )
    assert message.startswith(f"{task.instruction}\n\nYour summary of the work so far:\nI counted")
    np.testing.assert_array_equal(calls[n + 1].tokens, chat.opening(SYSTEM["bash"], message))
    assert calls[n + 1].experts_start == 0
    assert [c.turn for c in calls] == list(range(n + 3))
    assert [t.join for t in second.turns] == ["split", "strict"]
    assert count([first, second]).joins == {"split": 1, "strict": n + 1}


def test_chunks_can_be_many(chat, task):
    chunks, _ = play(task, chat, [ECHO] * 30)
    assert len(chunks) > 3 and sum(len(c.turns) for c in chunks) == 30
    assert {c.status for c in chunks} == {"out_of_turns"}
    for chunk in chunks[:-1]:
        assert [t.action for t in chunk.turns[:-1]] == ["command"] * (len(chunk.turns) - 1)
        assert chunk.turns[-1].action == "summary" and len(chunk.turns) > 1
    assert max(len(c.tokens) for c in chunks) <= CONFIG.max_context
    assert ECHO in chat.decode(chunks[-1].turns[0].context)  # what was said as a summary


def test_a_cut_summary_is_not_used(chat, task):
    n = until_asked(task, chat)
    script = [ECHO] * n + ["maple " * 400, SUBMIT]
    (first, second), _ = play(task, chat, script)
    lost = first.turns[-1]
    assert (lost.action, lost.finish, len(lost.sampled)) == ("summary", "length", 150)
    message = chat.decode(second.turns[0].context)
    assert "maple" not in message.replace(task.instruction, "")
    assert "there is no summary of it" in message and task.instruction in message
    assert second.status == "submitted"


def test_a_summary_that_fails_is_infrastructure(chat, task):
    n = until_asked(task, chat)
    (chunk,), sampler = play(task, chat, [ECHO] * n + [SamplerError("engine gone")])
    assert chunk.status == "infra" and len(chunk.turns) == n and len(sampler.calls) == n + 1


def test_a_question_is_forgotten_with_the_rest(chat, task):
    """Terminus asks whether the task is complete; after a summary it has to be asked again."""
    step, done = (terminus("seq 60\n", done=d, wait=0.3) for d in (False, True))
    changes = {"protocol": "terminus", "max_context": 4000, "max_reply": 300, "compact_below": 900}
    n = until_asked(task, chat, reply=step, **changes)
    chunks, _ = play(task, chat, [step] * (n - 1) + [done, "summary", done, done], **changes)
    actions = [[t.action for t in chunk.turns] for chunk in chunks]
    assert actions == [["command"] * (n - 1) + ["submit", "summary"], ["submit", "submit"]]
    assert [c.status for c in chunks] == ["submitted"] * 2
    assert "Current Terminal Screen:\n" in chat.decode(chunks[1].turns[0].context)


def test_text_histories_are_replaced(task):
    """With a template that only grows; tests/agent/test_history.py has the other."""
    chat = Chat(TOKENIZER, TEMPLATE, appends=False)
    n = until_asked(task, chat, history="stitched")
    script = [ECHO] * n + ["I counted to sixty.", bash("echo on"), SUBMIT]
    (first, second), sampler = play(task, chat, script, history="stitched")
    assert first.turns[-1].action == "summary" and len(first.turns) == n + 1
    assert [t.join for t in second.turns] == ["split", "strict"]
    message = chat.decode(second.turns[0].context)
    assert "I counted to sixty." in message and chat.decode(sampler.calls[n + 1].tokens) == message
    assert count([first, second]).drifted == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"max_summary": 0},
            "compact_below=700 free tokens must hold max_reply=120 and max_summary=0",
        ),
        ({"max_summary": 580}, "must hold max_reply=120 and max_summary=580, or summaries are cut"),
        ({"max_reply": 550}, "must hold max_reply=550"),
        (
            {"max_context": 850},
            "max_context=850 must be above compact_below=700 and max_summary=150",
        ),
        ({"history": "retokenized"}, "compact_below needs history tokens or stitched"),
    ],
)
def test_summaries_that_would_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)
    dataclasses.replace(CONFIG, **{"compact_below": 0} | changes)
