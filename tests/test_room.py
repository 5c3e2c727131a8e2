"""Summaries are given room in the tokens of the tasks at hand, or the run is refused."""

import dataclasses

import pytest
from fakes import EPISODE, TOKENIZER, generated

from t1jax.agent.chat import Chat
from t1jax.agent.episode import summary_request
from t1jax.experiment import ConfigError
from t1jax.room import check_room

CONFIG = dataclasses.replace(EPISODE, compact_below=900, max_summary=100)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return [task for task, _ in generated(tmp_path_factory.mktemp("tasks"), 2)]


def check(tasks, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    template = TOKENIZER.parent / "chat_template_drops.jinja"
    tokens = config.history == "tokens"
    chat = Chat(TOKENIZER) if tokens else Chat(TOKENIZER, template, appends=False)
    check_room(config, chat, tasks)


@pytest.mark.parametrize("history", ["tokens", "stitched"])
def test_room_is_needed_for_the_request_and_for_what_opens_a_chunk(tasks, history):
    check(tasks, history=history)
    asked = len(Chat(TOKENIZER).encode(summary_request(100)))
    assert 200 < asked < 600
    with pytest.raises(
        ConfigError, match=r"compact_below=\d+ free tokens do not hold max_reply=200"
    ):
        check(tasks, history=history, compact_below=300 + asked)
    with pytest.raises(
        ConfigError, match=r"compact_below=900 does not hold the \d+ tokens that may"
    ):
        check(tasks, history=history, max_output_bytes=2900)
    long = dataclasses.replace(tasks[1], name="long", instruction="maple " * 3000)
    with pytest.raises(ConfigError, match=r"tokens that may open a chunk of long: its instruction"):
        check([tasks[0], long], history=history)
    check([tasks[0], long], history=history, compact_below=0)


def test_instructions_count_in_tokens(tasks):
    """More bytes than there is room for, but few tokens."""
    task = dataclasses.replace(tasks[0], instruction=" maple" * 600)
    assert len(task.instruction) > 4000 - 900
    check([task])
