"""Chat templates: taken apart, appended to, and refused where that would change what was said."""

import json

import numpy as np
import pytest
from fakes import TOKENIZER

from t1jax.agent.chat import Chat
from t1jax.agent.template import (
    CHATML,
    TEXTS,
    Template,
    TemplateError,
    before_replies,
    conversation,
    learn,
    read_template,
)

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
# Every reply keeps the empty thoughts its prompt had: append-only.
APPENDS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n{{ m.content }}<|im_end|>\n"
    "{% else %}" + TURN + "{% endif %}{% endfor %}" + PROMPT
)
# As Qwen writes them: thoughts belong to the last reply only.
DROPS_THOUGHTS = "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT
CUTS_THOUGHTS = APPENDS.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}", 1)
TRIMS = APPENDS.replace("{{ m.content }}", "{{ m.content | trim }}")
TRIMS_OTHERS = APPENDS.replace(TURN, TURN.replace("m.content", "m.content | trim"))
CUTS_CALLS = APPENDS.replace("{{ m.content }}", "{{ m.content.split('<tool_call>')[0] }}", 1)
COUNTS = APPENDS.replace(PROMPT, "{{ messages | length }}" + PROMPT)
ADDS_SYSTEM = APPENDS.replace(
    "{% for m in messages %}",
    "<|im_start|>system\nYou are Qwen.<|im_end|>\n{% for m in messages if m.role != 'system' %}",
)


def written(tmp_path, source: str):
    path = tmp_path / "chat_template.jinja"
    path.write_text(source)
    return path


def test_an_append_only_template_gives_its_own_ids(tmp_path):
    chat = Chat(TOKENIZER, written(tmp_path, APPENDS))
    ids = [chat.opening("Be brief.", "List."), chat.reply("ls"), chat.observation("a\nb")]
    text = Template(APPENDS).render(conversation("Be brief.", "List.", [("ls", "a\nb")]))
    assert chat.decode(np.concatenate(ids)) == text
    np.testing.assert_array_equal(np.concatenate(ids), chat.encode_rendered(text))


def test_the_built_in_pieces_are_chatml(tmp_path):
    """By hand: the append-only template above is ChatML with thinking disabled."""
    assert learn(Template(APPENDS)) == CHATML
    one, other = Chat(TOKENIZER), Chat(TOKENIZER, written(tmp_path, APPENDS))
    for closed in (True, False):
        np.testing.assert_array_equal(
            one.observation(TEXTS[1], closed), other.observation(TEXTS[1], closed)
        )
    np.testing.assert_array_equal(one.opening("s", "u"), other.opening("s", "u"))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (DROPS_THOUGHTS, "not append-only: it writes the prompt of a reply as"),
        (CUTS_THOUGHTS, "not append-only: after 4 turns token .* differs, rendered .* appended"),
        (TRIMS, "not append-only: after 0 turns token"),
        (TRIMS_OTHERS, "not append-only: after 0 turns token"),
        (CUTS_CALLS, "not append-only: after 6 turns token"),
        ("{{ bos_token }}" + APPENDS, "uses bos_token: write the token itself"),
        ("{{ 1 / 0 }}", "does not render: division by zero"),
        ("{% for i in range(9999999) %}{% endfor %}", "does not render"),
        (COUNTS, "not append-only"),
        (ADDS_SYSTEM, "leaves out the system message"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "does not end a reply with"),
        ("{% for m in messages %}", "cannot be parsed"),
        ("{{ raise_exception('no system, please') }}", "does not render: no system, please"),
        ("{{ ''.__class__.__mro__ }}", "does not render|leaves out"),
    ],
)
def test_a_template_that_cannot_be_appended_to_is_refused(tmp_path, source, says):
    with pytest.raises(TemplateError, match=says) as caught:
        Chat(TOKENIZER, written(tmp_path, source))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        *(APPENDS, DROPS_THOUGHTS, CUTS_THOUGHTS, TRIMS, CUTS_CALLS, COUNTS),
        DROPS_THOUGHTS.replace("in messages", "in messages if m in messages[:2] + messages[-4:]"),
        "{% for m in messages %}{{ m.content }}{% endfor %}",
    ],
)
def test_one_that_need_only_render_may_rewrite_what_came_before(tmp_path, source):
    Chat(TOKENIZER, written(tmp_path, source), appends=False)


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("{{ raise_exception('too\nmany') }}", "does not render: too many"),
        ("{{ 1 / 0 }}", "does not render: division by zero"),
        ("{{ messages[99].content }}", "does not render: .*no element 99"),
        ("{{ 'x'.join(1) }}", "does not render"),
        ("{{ ' ' * 10 ** 15 }}", "does not render: MemoryError"),
        ("", "leaves out the system message"),
        ("{{ messages[-1].content }}", "leaves out the system message"),
        ("{% for m in messages[:2] %}" + TURN + "{% endfor %}", "leaves out the reply . message"),
        ("{% for m in messages[1:] %}" + TURN + "{% endfor %}", "leaves out the system message"),
        ("{% for m in messages | reverse %}" + TURN + "{% endfor %}", "changes their order"),
    ],
)
def test_one_that_fails_after_some_turns_is_refused(tmp_path, fault, says, turns):
    if not turns and "reply" in says:
        return  # nothing is left out yet
    count = 2 + 2 * turns
    source = f"{{% if messages | length >= {count} %}}{fault}{{% else %}}{APPENDS}{{% endif %}}"
    with pytest.raises(TemplateError, match=says) as caught:
        Chat(TOKENIZER, written(tmp_path, source), appends=False)
    assert "\n" not in str(caught.value)


def test_the_text_before_each_reply():
    template = Template(DROPS_THOUGHTS.replace("in messages", "in messages if m.content != 'b'"))
    before = before_replies(template, conversation("s", "u", [("a", "b"), ("a", "c"), ("b", "d")]))
    head = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    between = "<|im_end|>\n<|im_start|>assistant\n"
    last = "<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    assert before == [head, between, last]
    template = Template("{% for m in messages[:3] + messages[5:] %}{{ m.content }},{% endfor %}")
    many = conversation("s", "u", [("a", "b")] * 12)
    assert before_replies(template, many) == ["s,u,", None, ",b,", *[",b,"] * 9]


def test_text_that_looks_special_stays_text_under_a_template_too(tmp_path):
    chat = Chat(TOKENIZER, written(tmp_path, APPENDS))
    ids = chat.observation("<|im_end|> {{ 1 + 1 }}")
    assert (ids == chat.stop_ids[0]).sum() == 1
    assert "<|im_end|> {{ 1 + 1 }}" in chat.decode(ids)


def test_what_templates_may_use():
    source = (
        "{% for m in messages %}{{ m.content | tojson(ensure_ascii=True) }}{% break %}{% endfor %}"
    )
    assert Template(source).render(conversation("é", "u", [])) == '"\\u00e9"'


def test_where_templates_are_found(tmp_path):
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": APPENDS}))
    assert learn(read_template(path)) == CHATML
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": APPENDS}]
    path.write_text(json.dumps({"chat_template": named}))
    assert learn(read_template(path)) == CHATML
    broken = ({"chat_template": named[:1]}, {"chat_template": [{"name": "default"}]}, [1], 1)
    for text in ("{}", "[", *map(json.dumps, broken)):
        path.write_text(text)
        with pytest.raises(TemplateError):
            read_template(path)
    with pytest.raises(TemplateError, match="cannot be read"):
        read_template(tmp_path / "none.jinja")
