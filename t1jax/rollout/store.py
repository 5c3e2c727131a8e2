"""Trajectories as Parquet files, one row a chunk, one file a step. The round trip is exact.

`trajectories/step_000012.parquet` can be read by any Parquet reader. Per-token columns, row t for token t:
tokens, sampled, logprobs, versions, turn_index; `experts` holds the raw bytes of an array of
`experts_dtype` and `experts_shape` = [N-1, L, K]; `turns` and `verdict` are nested records. The schema's
version stands in the file's metadata. A file appears whole or not at all, and its pages have checksums. What the
trainer inferred of the same rows lies beside them in `advantages/`, under the same names.

Text is stored as it is, but for halves of surrogate pairs, which UTF-8 does not have: they become "?".
"""

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from t1jax.types import Assertion, ExecResult, Trajectory, Turn, Verdict

VERSION = "2"
_KEY = b"t1jax.trajectories"
_ROWS = 16  # a row group, what a reader must hold at once
_OPTIONAL = {"verdict", "outcome", "reward", "command", "result"}  # all else has a value
_PER_TOKEN = ("tokens", "sampled", "logprobs", "versions", "turn_index")

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
    _write_table(path, pa.Table.from_pylist([storable(_row(t)) for t in trajectories], SCHEMA))


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

    def row_of(row: dict) -> tuple:
        place = row["trial"], row["chunk"]
        return place, {name: np.array(row[name], np.float32) for name in INFERRED}

    return dict(_read(step_path(folder, step), ADVANTAGES, row_of))


def storable(value: Any) -> Any:
    """A value as it comes back from a file: text in it, however deep, without halves of surrogate pairs.

    They come from escapes in JSON and from names of files that are not UTF-8.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {name: storable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [storable(item) for item in value]
    return value


def _write_table(path: Path, table: pa.Table) -> None:
    path = Path(path)
    tmp = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(tmp, "wb") as file:
                pq.write_table(
                    table, file, row_group_size=_ROWS, compression="zstd", write_page_checksum=True
                )
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
    return _read(path, SCHEMA, _trajectory)


def _read(path: Path, schema: pa.Schema, make: Callable[[dict], Any]) -> Iterator[Any]:
    """make(row) of all rows. Raises StoreError for whatever does not come from `_write_table`."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            found = file.schema_arrow
            version = (found.metadata or {}).get(_KEY, b"none").decode()
            if version != VERSION:
                raise StoreError(
                    f"{path} has trajectory schema {version}, this code reads {VERSION}"
                )
            for field in schema:
                if found.names.count(field.name) != 1 or found.field(field.name).type != field.type:
                    raise ValueError(f"column {field.name} is missing, doubled or of another type")
            for batch in file.iter_batches(_ROWS, columns=schema.names):
                for field in schema:
                    _check_filled(field.name, batch.column(field.name))
                yield from map(make, batch.to_pylist())
    except (OSError, pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise StoreError(f"cannot read {path}: {' '.join(str(error).split())}") from error


def _check_filled(name: str, column: pa.Array) -> None:
    """Raises ValueError where a value is missing that every row has, in records within records, too."""
    if column.null_count and name.split(".")[-1] not in _OPTIONAL:
        raise ValueError(f"column {name} lacks a value")
    column = column.drop_null()
    if pa.types.is_struct(column.type):
        for field, values in zip(column.type, column.flatten(), strict=True):
            _check_filled(f"{name}.{field.name}", values)
    elif pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type):
        _check_filled(name, column.flatten())


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
    """The row as it was before `_row`. Raises ValueError where its columns disagree."""
    place = f"trial {row['trial']}, chunk {row['chunk']}"
    columns = {
        name: np.array(row[name], SCHEMA.field(name).type.value_type.to_pandas_dtype())
        for name in _PER_TOKEN
    }
    counts = [
        turn.pop(name) for turn in row["turns"] for name in ("context_tokens", "sampled_tokens")
    ]
    if min(counts, default=0) < 0 or {len(c) for c in columns.values()} != {sum(counts)}:
        raise ValueError(f"{place}: its turns have {sum(counts)} tokens, its columns do not")
    edges = np.cumsum(counts)
    tokens, logprobs = (np.split(columns[name], edges) for name in ("tokens", "logprobs"))
    turns = []
    for i, turn in enumerate(row["turns"]):
        result, drop = turn.pop("result"), tuple(turn.pop("drop"))
        turns.append(
            Turn(
                context=tokens[2 * i],
                sampled=tokens[2 * i + 1],
                logprobs=logprobs[2 * i + 1],
                result=result and ExecResult(**result),
                drop=drop,
                **turn,
            )
        )
    verdict = row["verdict"]
    if verdict is not None:
        assertions = tuple(Assertion(**a) for a in verdict.pop("assertions"))
        verdict = Verdict(assertions=assertions, **verdict)
    plain = ("task", "family", "trial", "attempt", "chunk", "status", "cause", "temperature")
    trajectory = Trajectory(
        **{name: row[name] for name in plain},
        turns=tuple(turns),
        experts=_experts(row, place),
        verdict=verdict,
        reward=row["reward"],
        seconds=row["seconds"],
    )
    for name, column in columns.items():  # what readers of Parquet see is what the turns say
        equal_nan = name == "logprobs"
        if not np.array_equal(column, getattr(trajectory, name), equal_nan=equal_nan):
            raise ValueError(f"{place}: column {name} is not what its turns say")
    return trajectory


def _experts(row: dict, place: str) -> np.ndarray:
    """u8|u16[N-1, L, K]."""
    kind, shape, data = row["experts_dtype"], row["experts_shape"], row["experts"]
    if kind not in ("uint8", "uint16"):
        raise ValueError(f"{place}: experts of type {kind!r}")
    if min(shape) < 0 or math.prod(shape) * np.dtype(kind).itemsize != len(data):
        raise ValueError(f"{place}: {len(data)} bytes of experts are no {kind}{shape}")
    return np.frombuffer(data, kind).reshape(shape)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
