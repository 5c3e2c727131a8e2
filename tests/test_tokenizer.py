"""The tokenizer: reproducible, exact in size, and one token for what the tasks are made of."""

import json

import pytest
from fakes import TOKENIZER

from t1jax.agent.chat import SPECIAL_TOKENS, Chat
from t1jax.agent.families import NAMES
from t1jax.tokenizer import corpus, train


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train(corpus(400), 512).save(str(path))
    return path


def test_training_is_reproducible(trained):
    assert train(corpus(400), 512).to_str() == json.dumps(
        json.loads(trained.read_text()), ensure_ascii=False, separators=(",", ":")
    )


@pytest.mark.parametrize("which", ["trained", "shipped"])
def test_names_are_one_token_and_ids_are_all_used(which, trained):
    path = trained if which == "trained" else TOKENIZER
    chat = Chat(path)
    assert chat.vocab_size == 512
    assert [n for n in NAMES if len(chat.encode(f" {n}")) != 1] == []
    added = {t["content"]: t["id"] for t in json.loads(path.read_text())["added_tokens"]}
    assert [added[t] for t in SPECIAL_TOKENS] == list(range(507, 512))


def test_the_frame_of_an_action_is_two_tokens(trained):
    chat = Chat(trained)
    words = chat.encode("sort -u maple > cedar")
    assert (
        len(chat.reply("```bash\nsort -u maple > cedar\n```")) == len(words) + 3
    )  # with <|im_end|>
    assert len(chat.reply("```submit\n```")) == 2


def test_spare_ids_fill_the_vocabulary(tmp_path):
    path = tmp_path / "tokenizer.json"
    train(iter(["ab ab ab"]), 320).save(str(path))
    assert Chat(path).vocab_size == 320
