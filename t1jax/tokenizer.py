"""Trains the tiny models' tokenizer on the harness's own text.

    python -m t1jax.tokenizer --out=configs/assets/tiny/tokenizer.json --vocab=512

Byte-level BPE with the Qwen special tokens and nearly the Qwen pre-tokenizer, so that any text can be
encoded, and the task words, each with the space before it, and the fences of an action are one token.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from absl import flags
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from t1jax import command
from t1jax.agent.action import SILENT, SYSTEM
from t1jax.agent.chat import SPECIAL_TOKENS
from t1jax.agent.families import NAMES
from t1jax.agent.generate import instances

# The opening line of a fenced block and its closing line stay whole: the frame of an action is two tokens.
# Then Qwen's split: contractions, words with one leading character, single digits, punctuation, line ends.
SPLIT = (
    r"```[a-z]+\n(?:```)?|\n```(?![a-z])|"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train(texts: Iterator[str], vocab: int) -> Tokenizer:
    """A tokenizer of exactly `vocab` ids, the special tokens last. Deterministic in `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _with_specials(tokenizer, vocab)


def corpus(count: int = 4000) -> Iterator[str]:
    """What a policy reads and writes: prompts, replies, outputs, every name often."""
    for instance in itertools.islice(instances("train", 0), count):
        yield f"system\n{SYSTEM['bash']}"
        yield f"user\n{instance.instruction}"
        for script in (instance.solution, *instance.flawed):
            for line in script:
                yield f"```bash\n{line}\n```"
                yield f"user\n{SILENT}"
                yield "assistant\n"
            yield "```submit\n```"
            yield "exit 1"
            yield "\n\n"
        yield "".join(f" {name}" for name in NAMES)


def _with_specials(tokenizer: Tokenizer, vocab: int) -> Tokenizer:
    """Fills up to `vocab` ids with the special tokens at the end, and placeholders where BPE found less."""
    data = json.loads(tokenizer.to_str())
    size = len(data["model"]["vocab"])
    spare = [f"<|spare_{i}|>" for i in range(vocab - len(SPECIAL_TOKENS) - size)]
    tokenizer.add_special_tokens([*spare, *SPECIAL_TOKENS])
    return tokenizer


def main() -> None:
    tokenizer = train(corpus(), VOCAB.value)
    whole = [name for name in NAMES if len(tokenizer.encode(f" {name}").ids) == 1]
    out = Path(OUT.value)
    out.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out))
    print(
        f"{out}: {tokenizer.get_vocab_size()} ids, {len(whole)} of {len(NAMES)} names are one token"
    )


if __name__ == "__main__":
    OUT = flags.DEFINE_string("out", None, "The tokenizer.json to write.", required=True)
    VOCAB = flags.DEFINE_integer("vocab", 512, "How many ids.", lower_bound=300)
    command.run(main)
