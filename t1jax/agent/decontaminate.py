"""Tasks whose instructions share a run of 13 words with an evaluation set's (T1's decontamination)."""

import re
from collections.abc import Iterable

from t1jax.types import Task

N = 13  # words


def ngrams(text: str) -> set[tuple[str, ...]]:
    """All runs of N words, without case and punctuation; of a shorter text the whole."""
    words = re.findall(r"\w+", text.lower())
    if not words:
        return set()
    return {tuple(words[i : i + N]) for i in range(max(len(words) - N, 0) + 1)}


def index(tasks: Iterable[Task]) -> dict[tuple[str, ...], str]:
    """Runs of words -> the name of a task that has them."""
    return {gram: task.name for task in tasks for gram in ngrams(task.instruction)}


def find_contamination(task: Task, known: dict[tuple[str, ...], str]) -> str | None:
    """The evaluation task that it shares words with, and the words; None where there is none."""
    for gram in sorted(ngrams(task.instruction) & known.keys()):
        return f"{known[gram]}: {' '.join(gram)}"
    return None
