"""Trajectories as Parquet files, one row a chunk, one file a step. The round trip is exact.

`trajectories/step_000012.parquet` can be read by any Parquet reader. Per-token columns, row t for token t:
tokens, sampled, logprobs, versions, turn_index; `experts` holds the raw bytes of an array of
`experts_dtype` and `experts_shape` = [N-1, L, K]; `turns` and `verdict` are nested records. The schema's
version stands in the file's metadata. A file appears whole or not at all. What the trainer inferred of the same
rows lies beside them in `advantages/`, under the same names.
"""

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from t1jax.types import Assertion, ExecResult, Trajectory, Turn, Verdict

VERSION = "2"
_KEY = b"t1jax.trajectories"
_ROWS = 16  # a row group, what a reader must hold at once

_RESULT = pa.struct(
    [
        ("exit_code", pa.int32()),
        ("output", pa.string()),
        ("seconds", pa.float64()),
        ("timed_out", pa.bool_()),
    ]
)
_TURN = pa.struct(
    [
        ("context_tokens", pa.int32()),
        ("sampled_tokens", pa.int32()),
        ("finish", pa.string()),
        ("version", pa.int32()),
        ("action", pa.string()),
        ("command", pa.string()),
        ("result", _RESULT),
        ("seconds", pa.float64()),
        ("digest", pa.string()),
        ("join", pa.string()),
        ("drop", pa.list_(pa.int32(), 2)),
    ]
)
_VERDICT = pa.struct(
    [
        ("assertions", pa.list_(pa.struct([("name", pa.string()), ("passed", pa.bool_())]))),
        ("outcome", pa.bool_()),
        ("cause", pa.string()),
        ("output", pa.string()),
        ("seconds", pa.float64()),
    ]
)
SCHEMA = pa.schema(
    [
        ("task", pa.string()),
        ("family", pa.string()),
        ("trial", pa.int64()),
        ("attempt", pa.int32()),
        ("chunk", pa.int32()),
        ("status", pa.string()),
        ("cause", pa.string()),
        ("temperature", pa.float64()),
        ("reward", pa.float64()),
        ("seconds", pa.float64()),
        ("verdict", _VERDICT),
        ("turns", pa.list_(_TURN)),
        ("tokens", pa.list_(pa.int32())),
        ("sampled", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        ("turn_index", pa.list_(pa.int32())),
        ("experts_dtype", pa.string()),
        ("experts_shape", pa.list_(pa.int64(), 3)),
        ("experts", pa.large_binary()),
    ],
    {_KEY: VERSION.encode()},
)

INFERRED = ("old_logp", "values", "advantages", "returns")
ADVANTAGES = pa.schema(
    [
        ("trial", pa.int64()),
        ("chunk", pa.int32()),
        *((name, pa.list_(pa.float32())) for name in INFERRED),
    ],
    SCHEMA.metadata,
)


class StoreError(RuntimeError):
    """A file of trajectories cannot be written or read: one line naming the file and the reason."""


def step_path(folder: Path, step: int) -> Path:
    """Where the trajectories of a step lie."""
    return Path(folder) / f"step_{step:06d}.parquet"


def steps(folder: Path) -> list[int]:
    """The steps that have a file, in order; leftovers of an interrupted write are none of them."""
    names = os.listdir(folder) if Path(folder).is_dir() else []
    return sorted(int(m[1]) for n in names if (m := re.fullmatch(r"step_(\d{6,})\.parquet", n)))


def write_step(folder: Path, step: int, trajectories: Sequence[Trajectory]) -> None:
    """Writes a step's trajectories, in place of those that were there. Raises StoreError."""
    write(step_path(folder, step), trajectories)


def read_step(folder: Path, step: int) -> list[Trajectory]:
    """A step's trajectories in the order they were written. Raises StoreError."""
    return list(read(step_path(folder, step)))


def read_run(folder: Path) -> Iterator[tuple[int, Trajectory]]:
    """All trajectories of a run with their steps, in order, a few in memory at a time."""
    for step in steps(folder):
        for trajectory in read(step_path(folder, step)):
            yield step, trajectory


def drop_after(folder: Path, last: int) -> None:
    """Removes the files of steps above `last`: a resumed run makes them again."""
    for step in steps(folder):
        if step > last:
            step_path(folder, step).unlink()


def write(path: Path, trajectories: Sequence[Trajectory]) -> None:
    """Writes a file whole or not at all; folders are made. Raises StoreError (disk full, no permission)."""
    _write_table(path, pa.Table.from_pylist([_row(t) for t in trajectories], SCHEMA))


def write_advantages(
    folder: Path, step: int, trajectories: Sequence[Trajectory], arrays: Mapping[str, np.ndarray]
) -> None:
    """What the trainer inferred of a step's rows: f32[B, T] by name, one trajectory a row (see batch.py).

    One row a chunk, and in it one number a token. Raises StoreError.
    """
    rows = [
        {"trial": t.trial, "chunk": t.chunk}
        | {name: arrays[name][i, : len(t.tokens)] for name in INFERRED}
        for i, t in enumerate(trajectories)
    ]
    _write_table(step_path(folder, step), pa.Table.from_pylist(rows, ADVANTAGES))


def read_advantages(folder: Path, step: int) -> dict[tuple[int, int], dict[str, np.ndarray]]:
    """By (trial, chunk): f32[N] by name. Raises StoreError."""
    return {
        (row["trial"], row["chunk"]): {name: np.array(row[name], np.float32) for name in INFERRED}
        for row in _rows(step_path(folder, step))
    }


def _write_table(path: Path, table: pa.Table) -> None:
    path = Path(path)
    tmp = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(tmp, "wb") as file:
                pq.write_table(table, file, row_group_size=_ROWS, compression="zstd")
                file.flush()
                os.fsync(file.fileno())
            os.replace(tmp, path)
        finally:
            tmp.unlink(missing_ok=True)
        _sync_folder(path.parent)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error


def read(path: Path) -> Iterator[Trajectory]:
    """The trajectories of a file, a row group in memory at a time. Raises StoreError."""
    return map(_trajectory, _rows(path))


def _rows(path: Path) -> Iterator[dict]:
    try:
        with pq.ParquetFile(path) as file:
            version = (file.schema_arrow.metadata or {}).get(_KEY, b"none").decode()
            if version != VERSION:
                raise StoreError(
                    f"{path} has trajectory schema {version}, this code reads {VERSION}"
                )
            for batch in file.iter_batches(_ROWS):
                yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise StoreError(f"cannot read {path}: {error}") from error


def _row(t: Trajectory) -> dict:
    experts = np.ascontiguousarray(t.experts)
    return {
        "task": t.task,
        "family": t.family,
        "trial": t.trial,
        "attempt": t.attempt,
        "chunk": t.chunk,
        "status": t.status,
        "cause": t.cause,
        "temperature": t.temperature,
        "reward": t.reward,
        "seconds": t.seconds,
        "verdict": t.verdict and dataclasses.asdict(t.verdict),
        "turns": [
            {
                "context_tokens": len(turn.context),
                "sampled_tokens": len(turn.sampled),
                "finish": turn.finish,
                "version": turn.version,
                "action": turn.action,
                "command": turn.command,
                "result": turn.result and dataclasses.asdict(turn.result),
                "seconds": turn.seconds,
                "digest": turn.digest,
                "join": turn.join,
                "drop": turn.drop,
            }
            for turn in t.turns
        ],
        "tokens": t.tokens,
        "sampled": t.sampled,
        "logprobs": t.logprobs,
        "versions": t.versions,
        "turn_index": t.turn_index,
        "experts_dtype": experts.dtype.name,
        "experts_shape": experts.shape,
        "experts": experts.tobytes(),
    }


def _trajectory(row: dict) -> Trajectory:
    tokens = np.array(row["tokens"], np.int32)
    logprobs = np.array(row["logprobs"], np.float32)
    turns, start = [], 0
    for turn in row["turns"]:
        first = start + turn.pop("context_tokens")
        stop = first + turn.pop("sampled_tokens")
        result, drop = turn.pop("result"), tuple(turn.pop("drop"))
        turns.append(
            Turn(
                context=tokens[start:first],
                sampled=tokens[first:stop],
                logprobs=logprobs[first:stop],
                result=result and ExecResult(**result),
                drop=drop,
                **turn,
            )
        )
        start = stop
    experts = np.frombuffer(row["experts"], row["experts_dtype"]).reshape(row["experts_shape"])
    verdict = row["verdict"]
    if verdict is not None:
        assertions = tuple(Assertion(**a) for a in verdict.pop("assertions"))
        verdict = Verdict(assertions=assertions, **verdict)
    plain = ("task", "family", "trial", "attempt", "chunk", "status", "cause", "temperature")
    return Trajectory(
        **{name: row[name] for name in plain},
        turns=tuple(turns),
        experts=experts,
        verdict=verdict,
        reward=row["reward"],
        seconds=row["seconds"],
    )


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
