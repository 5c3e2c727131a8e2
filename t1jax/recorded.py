"""Recorded trials as streams to imitate: ATIF documents of this harness or another."""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson

from t1jax.agent.action import SYSTEM, Malformed, parse
from t1jax.agent.chat import Chat
from t1jax.atif import read
from t1jax.experiment import ConfigError, Experiment
from t1jax.transcript import Transcript


class Stream(NamedTuple):
    """tokens i32[N] and which of them to imitate, bool[N]."""

    tokens: np.ndarray
    imitated: np.ndarray


def read_recorded(experiment: Experiment, chat: Chat) -> tuple[list[Stream], Counter]:
    """The streams of `sft.trajectories`/*.json, in the order of their names, and what became of the files.

    Left out are those whose verifier did not pass them ("failed"; of other harnesses that is not known), those
    that do not fit a row ("too_long"), and those without one action in this run's protocol ("no_action"). Raises
    ConfigError naming the file and the place.
    """
    folder, protocol = Path(experiment.sft.trajectories), experiment.episode.protocol
    # An export that was killed leaves half a file of that name.
    paths = sorted(p for p in folder.glob("*.json") if not p.name.startswith("tmp-"))
    if not paths:
        raise ConfigError(f"sft.trajectories={folder} holds no ATIF documents (*.json)")
    streams, counts = [], Counter(imitated=0, failed=0, no_action=0, too_long=0)
    for path in paths:
        try:
            transcript = read(orjson.loads(path.read_bytes()))
            stream = render(transcript, chat, SYSTEM[protocol])
        except (OSError, ValueError) as error:
            raise ConfigError(f"sft.trajectories: {path}: {error}") from None
        if transcript.resolved is False:
            counts["failed"] += 1
        elif all(isinstance(parse(e.reply, protocol), Malformed) for e in transcript.exchanges):
            counts["no_action"] += 1
        elif len(stream.tokens) > experiment.sft.row_length:
            counts["too_long"] += 1
        else:
            counts["imitated"] += 1
            streams.append(stream)
    if not streams:
        raise ConfigError(f"sft.trajectories={folder} has nothing to imitate: {dict(counts)}")
    return streams, counts


def render(transcript: Transcript, chat: Chat, system: str) -> Stream:
    """The stream of a trial in which this was said; all replies but copied ones are imitated.

    system: for transcripts without one. What followed the last reply is left out.
    """
    parts = [(chat.opening(transcript.system or system, transcript.task), False)]
    for i, exchange in enumerate(transcript.exchanges):
        if i:
            heard = transcript.exchanges[i - 1].observation
            parts.append((chat.observation(heard or ""), False))
        parts.append((chat.reply(exchange.reply), not exchange.copied))
    return Stream(
        np.concatenate([ids for ids, _ in parts]),
        np.concatenate([np.full(len(ids), imitated) for ids, imitated in parts]),
    )
