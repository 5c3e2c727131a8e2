"""Episodes in the Terminus-2 protocol: what the agent reads, how it ends, and what a long one costs."""

import dataclasses
import gc
import resource
import time

import numpy as np
import pytest
from fakes import EPISODE, TOKENIZER, generated, need_sandbox, run_script, terminus

from t1jax.agent.action import CONFIRM, SYSTEM
from t1jax.agent.chat import Chat

CONFIG = dataclasses.replace(
    EPISODE, protocol="terminus", max_reply=600, max_context=20_000, max_output_bytes=10_000
)
DONE = terminus(done=True)
NEW, SCREEN = "New Terminal Output:\n", "Current Terminal Screen:\n"


@pytest.fixture(scope="module")
def chat():
    return Chat(TOKENIZER)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    need_sandbox()
    return [task for task, _ in generated(tmp_path_factory.mktemp("tasks"), 2)]


def observed(chat, chunk) -> list[str]:
    """What the agent read after each reply but the last."""
    texts = [chat.decode(turn.context) for turn in chunk.turns[1:]]
    return [t.split("user\n", 1)[1].split("<|im_end|>")[0] for t in texts]


def play(chat, task, *script, **changes):
    (chunk,), sampler = run_script(task, chat, script, dataclasses.replace(CONFIG, **changes))
    return chunk, sampler


def test_a_whole_episode(chat, tasks):
    script = [terminus("mkdir x; cd x\n", "pwd\n", wait=0.3), DONE, DONE]
    chunk, sampler = play(chat, tasks[0], *script)
    assert (chunk.status, chunk.cause) == ("submitted", "") and chunk.ended
    opening = chat.decode(chunk.turns[0].context)
    prompt = opening.split(SCREEN)[1].split("<|im_end|>")[0]
    np.testing.assert_array_equal(
        chunk.turns[0].context,
        chat.opening(SYSTEM["terminus"], f"{tasks[0].instruction}\n\n{SCREEN}{prompt}"),
    )
    ran, asked = observed(chat, chunk)
    assert ran == f"{NEW}{prompt} mkdir x; cd x\n{prompt} pwd\n/app/x\n{prompt}"
    assert asked == f"The terminal now:\n{NEW}{prompt}\n\n{CONFIRM}"
    assert [t.action for t in chunk.turns] == ["command", "submit", "submit"]
    assert [t.command for t in chunk.turns] == ["mkdir x; cd x\n\npwd\n", None, None]
    assert chunk.turns[0].result.output == ran
    assert [c.max_new for c in sampler.calls] == [600] * 3


def test_completion_counts_right_after_the_question_alone(chat, tasks):
    script = [
        DONE,
        terminus("echo more\n", wait=0.3),  # takes it back
        terminus("echo last\n", done=True, wait=0.3),  # runs, and is asked
        "no JSON",  # confirms nothing
        DONE,
        terminus("touch end\n", done=True, wait=0.3),  # what comes with the confirmation still runs
    ]
    chunk, _ = play(chat, tasks[0], *script)
    assert chunk.status == "submitted" and len(chunk.turns) == len(script)
    asked = [CONFIRM in text for text in observed(chat, chunk)]
    assert asked == [True, False, True, False, True]
    assert "last" in observed(chat, chunk)[2]
    assert [t.action for t in chunk.turns] == [
        *("submit", "command", "submit", "malformed", "submit", "submit")
    ]
    assert "touch end" in chunk.turns[-1].result.output


def test_errors_and_warnings_come_back_as_messages(chat, tasks):
    script = ["hello", f"So: {terminus()}", terminus("echo a", "\n", wait=0.3), DONE, DONE]
    chunk, _ = play(chat, tasks[0], *script)
    error, warned, joined, _ = observed(chat, chunk)
    assert error.startswith("Nothing was run, your reply could not be read.\nError: no JSON")
    assert warned.startswith("Your reply was read with warnings:\n- there is text before")
    assert NEW in warned  # it was run all the same
    assert "- command 1: no newline at its end" in joined and "echo a\na\n" in joined
    assert chunk.turns[0].result is None and chunk.turns[1].result is not None


def test_long_output_is_cut_as_one(chat, tasks):
    line = "yes maple | head -n 3000\n"
    chunk, _ = play(chat, tasks[0], terminus(line, line, wait=0.4), DONE, DONE, max_context=40_000)
    read = observed(chat, chunk)[0]
    assert len(read) < 10_000 + 100 and "bytes omitted" in read


def test_ending_the_terminal_ends_the_episode(chat, tasks):
    chunk, sampler = play(chat, tasks[0], terminus("exit\n", wait=0.3), DONE)
    assert chunk.status == "closed" and chunk.ended and "no server running" in chunk.cause
    assert len(sampler.calls) == 1 and chunk.turns[0].result is None


def test_a_task_without_tmux_is_an_infrastructure_failure(chat, tasks, tmp_path):
    (tmp_path / "Dockerfile").write_text(
        "FROM scratch\nRUN mkdir /only && ln -s /usr/bin/bash /only/bash\nENV PATH=/only\n"
    )
    chunk, sampler = play(chat, dataclasses.replace(tasks[0], environment=tmp_path))
    assert chunk.status == "infra" and "there is no tmux in the task's image" in chunk.cause
    assert sampler.calls == []


def test_time_runs_out_in_a_wait(chat, tasks):
    for changes, cause in (
        ({"agent_timeout_s": 1.0}, "the agent's 1 s were over"),
        ({"turn_timeout_s": 0.7}, "turn 1 took 0.7 s"),
    ):
        script = [terminus(), terminus("sleep 9\n", wait=9), DONE]
        chunk, sampler = play(chat, tasks[0], *script, command_timeout_s=60.0, **changes)
        assert (chunk.status, chunk.cause) == ("timeout", cause)
        assert len(sampler.calls) == 2 and chunk.turns[1].command == "sleep 9\n"
        assert chunk.seconds < 4


class Counting(Chat):
    characters = 0

    def encode(self, text):
        self.characters += len(text)
        return super().encode(text)


@pytest.mark.slow
def test_three_hundred_turns_cost_the_same_each(tasks):
    """Time and memory are flat, and the tokenizer sees each text once. Chunks keep the stream short."""
    chat = Counting(TOKENIZER)
    config = dataclasses.replace(
        CONFIG,
        max_turns=340,
        max_context=16_000,
        compact_below=3000,
        max_summary=1000,
        agent_timeout_s=600.0,
    )
    task = dataclasses.replace(tasks[0], agent_timeout_s=600.0)
    memory, times = [], []

    def reply(turn):
        async def say():
            gc.collect()
            memory.append(resident())
            times.append(time.monotonic())
            return terminus(f"seq {turn} {turn + 60}\n", wait=0.05)  # as a summary as good as any

        return say

    script = [reply(turn) for turn in range(340)]
    gc.freeze()  # what other tests have left: seconds a turn to look through
    try:
        chunks, _ = run_script(task, chat, script, config)
    finally:
        gc.unfreeze()
    turns = [turn for chunk in chunks for turn in chunk.turns]
    assert len(turns) == 340 and len(chunks) > 5
    assert sum(turn.action == "command" for turn in turns) > 300
    assert memory[-1] - memory[40] < 50 << 20
    seconds = np.diff(times)
    assert np.median(seconds[-80:]) < 1.5 * np.median(seconds[20:100])
    read = sum(len(chat.decode(chunk.tokens)) for chunk in chunks)
    assert chat.characters <= 1.1 * read


def resident() -> int:
    """Bytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
