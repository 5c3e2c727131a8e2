"""Trajectories to files and back: exact, whole or not at all."""

import dataclasses
import os
import random
import re
import resource

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from t1jax.rollout import store
from t1jax.rollout.store import StoreError
from t1jax.types import Assertion, ExecResult, Trajectory, Turn, Verdict

TEXTS = ("", "ok", "a\nb\0c", "\ufffd é 語 🙂", "x" * 10_000)


def random_trajectory(seed: int) -> Trajectory:
    """Anything a run can produce: no turns, empty replies, no verdict, wide experts, odd text."""
    rng, nprng = random.Random(seed), np.random.default_rng(seed)

    def ids(n):
        return nprng.integers(0, 248_320, n, dtype=np.int32)

    turns = []
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
        n = rng.randint(0, 6)
        result = ExecResult(
            rng.choice((0, 1, 124, 139)), rng.choice(TEXTS), rng.random(), rng.random() < 0.5
        )
        turns.append(
            Turn(
                context=ids(rng.randint(1, 9)),
                sampled=ids(n),
                logprobs=-nprng.exponential(size=n).astype(np.float32),
                finish=rng.choice(("stop", "length")),
                version=rng.randint(0, 3),
                action=rng.choice(("command", "submit", "malformed", "none")),
                command=rng.choice((None, *TEXTS)),
                result=rng.choice((None, result)),
                seconds=rng.random(),
                digest=f"{rng.getrandbits(64):016x}",
                join=rng.choice(("strict", "normalized", "split")),
                drop=(rng.randint(0, 96), rng.randint(0, 16)),
            )
        )
    n = sum(len(t.context) + len(t.sampled) for t in turns)
    shape = (max(n - 1, 0), *((4, 2) if n else (0, 0)))
    dtype = rng.choice((np.uint8, np.uint16))
    assertions = tuple(Assertion(rng.choice(TEXTS), i % 2 == 0) for i in range(rng.randint(0, 3)))
    verdict = Verdict(
        assertions, rng.choice((None, True, False)), "report", rng.choice(TEXTS), rng.random()
    )
    return Trajectory(
        task=f"task {seed}",
        family="edit",
        trial=rng.randint(0, 2**40),
        attempt=rng.randint(0, 2),
        chunk=0,
        turns=tuple(turns),
        experts=nprng.integers(0, 200, shape).astype(dtype),
        status=rng.choice(("submitted", "timeout", "infra", "context_full")),
        cause=rng.choice(TEXTS),
        temperature=rng.random(),
        verdict=rng.choice((None, verdict)),
        reward=rng.choice((None, 0.0, 1 / 3, 1.45)),
        seconds=rng.random(),
    )


def assert_same(a, b) -> None:
    """Equal to the last bit, types included."""
    if dataclasses.is_dataclass(a):
        assert type(a) is type(b)
        for field in dataclasses.fields(a):
            assert_same(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    elif isinstance(a, tuple):
        assert isinstance(b, tuple) and len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert type(a) is type(b) and a == b


def test_round_trip_is_exact(tmp_path):
    trajectories = [random_trajectory(seed) for seed in range(100)]
    store.write_step(tmp_path, 12, trajectories)
    assert os.listdir(tmp_path) == ["step_000012.parquet"]
    back = store.read_step(tmp_path, 12)
    assert len(back) == 100
    for a, b in zip(trajectories, back, strict=True):
        assert_same(a, b)
        b.check()


def test_log_probs_keep_every_bit(tmp_path):
    odd = np.array([np.nan, -np.inf, -0.0, 1e-45, np.finfo(np.float32).min], np.float32)
    base = next(t for t in map(random_trajectory, range(50)) if len(t.turns) == 1)
    turn = dataclasses.replace(base.turns[0], sampled=np.arange(5, dtype=np.int32), logprobs=odd)
    n = len(turn.context) + 5
    trajectory = dataclasses.replace(
        base, turns=(turn,), experts=np.zeros((n - 1, 4, 2), np.uint16)
    )
    store.write(tmp_path / "odd.parquet", [trajectory])
    assert_same(trajectory, next(store.read(tmp_path / "odd.parquet")))


def test_any_reader_finds_aligned_per_token_columns(tmp_path):
    trajectory = next(t for t in map(random_trajectory, range(50)) if len(t.turns) == 5)
    store.write_step(tmp_path, 0, [trajectory])
    (row,) = pq.read_table(store.step_path(tmp_path, 0)).to_pylist()
    for name in ("tokens", "sampled", "logprobs", "versions", "turn_index"):
        np.testing.assert_array_equal(row[name], getattr(trajectory, name))
    assert row["experts_shape"] == list(trajectory.experts.shape)


def test_a_run_is_read_in_order_and_lazily(tmp_path):
    for step in (2, 0, 10):
        store.write_step(tmp_path, step, [random_trajectory(step), random_trajectory(step + 100)])
    (tmp_path / ".step_000003.parquet.tmp").write_bytes(b"half")
    (tmp_path / "evaluation.parquet").write_bytes(b"not a step")
    assert store.steps(tmp_path) == [0, 2, 10]
    run = store.read_run(tmp_path)
    store.step_path(tmp_path, 10).write_bytes(b"broken")  # not opened before its turn
    first = [next(run) for _ in range(4)]
    assert [(step, t.task) for step, t in first] == [
        *((0, "task 0"), (0, "task 100"), (2, "task 2"), (2, "task 102"))
    ]
    with pytest.raises(StoreError, match="step_000010"):
        next(run)
    store.drop_after(tmp_path, 2)
    assert store.steps(tmp_path) == [0, 2]
    assert list(store.read_run(tmp_path / "nothing")) == []


def test_a_step_can_be_written_again(tmp_path):
    store.write_step(tmp_path, 1, [random_trajectory(1)])
    store.write_step(tmp_path, 1, [random_trajectory(2)])
    assert [t.task for t in store.read_step(tmp_path, 1)] == ["task 2"]


@pytest.fixture
def small_disk():
    """Files above 20 kB cannot be written, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_failed_write_leaves_what_was_there(tmp_path, small_disk):
    store.write_step(tmp_path, 1, [random_trajectory(1)])
    rng = np.random.default_rng(0)
    base = next(t for t in map(random_trajectory, range(50)) if len(t.turns) == 1)
    n = len(base.tokens)
    big = dataclasses.replace(base, experts=rng.integers(0, 255, (n - 1, 99, 99), np.uint8))
    with pytest.raises(StoreError, match=r"cannot write .*step_000001\.parquet: File too large"):
        store.write_step(tmp_path, 1, [big])
    assert os.listdir(tmp_path) == ["step_000001.parquet"]
    assert [t.task for t in store.read_step(tmp_path, 1)] == ["task 1"]


def test_bad_files_are_one_clear_line(tmp_path):
    with pytest.raises(StoreError, match=r"cannot read .*step_000009"):
        store.read_step(tmp_path, 9)
    path = store.step_path(tmp_path, 1)
    store.write_step(tmp_path, 1, [random_trajectory(s) for s in range(20)])
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(StoreError, match=r"cannot read .*step_000001") as caught:
        store.read_step(tmp_path, 1)
    assert "\n" not in str(caught.value)


def test_another_schema_is_refused(tmp_path):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    with pytest.raises(StoreError, match="has trajectory schema none, this code reads 2"):
        next(store.read(tmp_path / "a.parquet"))
    newer = store.SCHEMA.with_metadata({b"t1jax.trajectories": b"3"})
    pq.write_table(newer.empty_table(), tmp_path / "b.parquet")
    with pytest.raises(StoreError, match="schema 3, this code reads 2"):
        next(store.read(tmp_path / "b.parquet"))


def test_a_folder_where_the_file_should_be(tmp_path):
    (tmp_path / "step_000001.parquet").mkdir()
    with pytest.raises(StoreError, match="cannot write"):
        store.write_step(tmp_path, 1, [random_trajectory(1)])
    assert os.listdir(tmp_path) == ["step_000001.parquet"]


def test_what_was_inferred_comes_back_by_trial_and_chunk(tmp_path):
    """Rows are cut to their tokens; the numbers are exact."""
    trajectories = [t for t in map(random_trajectory, range(20)) if t.turns][:3]
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=(4, 200)).astype(np.float32) for name in store.INFERRED}
    store.write_advantages(tmp_path, 7, trajectories, arrays)
    found = store.read_advantages(tmp_path, 7)
    assert list(found) == [(t.trial, t.chunk) for t in trajectories]
    for i, t in enumerate(trajectories):
        for name, values in found[t.trial, t.chunk].items():
            assert values.dtype == np.float32
            np.testing.assert_array_equal(values, arrays[name][i, : len(t.tokens)])


def test_text_that_utf8_does_not_have_is_stored_as_question_marks(tmp_path):
    """JSON may escape half a surrogate pair, a file's name may hold any byte."""
    half, name = "a\ud83d", os.fsdecode(b"\xff.txt")
    result = ExecResult(0, half, 0.0, False)
    base = next(t for t in map(random_trajectory, range(50)) if t.turns)
    written = dataclasses.replace(
        base,
        task=name,
        cause=half,
        turns=(dataclasses.replace(base.turns[0], command=half, result=result), *base.turns[1:]),
        verdict=Verdict((Assertion(half, True),), True, "report", half, 0.0),
    )
    store.write_step(tmp_path, 0, [written])
    (back,) = store.read_step(tmp_path, 0)
    assert (back.task, back.cause) == ("?.txt", "a?")
    assert (back.turns[0].command, back.turns[0].result.output) == ("a?", "a?")
    assert (back.verdict.assertions[0].name, back.verdict.output) == ("a?", "a?")
    assert_same(back, dataclasses.replace(back, **store.storable({"task": name})))


@pytest.fixture
def rows():
    """Rows as they lie in a file; the first has two turns, a verdict and a result."""
    good = [random_trajectory(seed) for seed in range(100)]
    first = next(t for t in good if len(t.turns) == 2 and t.verdict and t.turns[0].result)
    return [store._row(t) for t in (first, *good[:3])]


def refused(tmp_path, table: pa.Table) -> str:
    pq.write_table(table, store.step_path(tmp_path, 0))
    with pytest.raises(StoreError, match=r"cannot read .*step_000000") as caught:
        store.read_step(tmp_path, 0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", store.SCHEMA.names)
def test_a_column_that_is_missing_or_of_another_type_is_named(tmp_path, rows, name):
    table = pa.Table.from_pylist(rows, store.SCHEMA)
    place = store.SCHEMA.get_field_index(name)
    for other in (pa.array([[{"a": 1}]] * 4), pa.array([b"1"] * 4), pa.nulls(4)):
        assert f"column {name} is" in refused(tmp_path, table.set_column(place, name, other))
    assert f"column {name} is" in refused(tmp_path, table.drop_columns([name]))
    assert f"column {name} is" in refused(tmp_path, table.append_column(name, table[name]))
    if name not in ("reward", "verdict"):
        nothing = pa.nulls(4, store.SCHEMA.field(name).type)
        assert f"column {name} lacks" in refused(tmp_path, table.set_column(place, name, nothing))


def columns(**changed):
    return lambda row: row | changed


def set_turn(name, value):
    def change(row):
        first, *others = row["turns"]
        return row | {"turns": [first | {name: value}, *others]}

    return change


def set_token(name, value):
    return lambda row: row | {name: [*list(row[name])[:-1], value]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (columns(experts=b"123"), r"chunk 0: 3 bytes of experts are no uint(8|16)\["),
        (columns(experts_dtype="object"), "chunk 0: experts of type 'object'"),
        (columns(experts_dtype="no type"), "chunk 0: experts of type 'no type'"),
        (columns(experts_shape=[-1, 4, 2]), "bytes of experts are no"),
        (columns(experts_shape=[2**62, 2**62, 2]), "bytes of experts are no"),
        (columns(experts_shape=None), "column experts_shape lacks a value"),
        (set_turn("context_tokens", -1), "its turns have .* tokens, its columns do not"),
        (set_turn("sampled_tokens", 99), "its turns have .* tokens, its columns do not"),
        (set_turn("join", None), "column turns.join lacks a value"),
        (set_turn("drop", [None, 0]), "column turns.drop lacks a value"),
        (set_token("tokens", None), "column tokens lacks a value"),
        (lambda row: row | {"tokens": row["tokens"][1:]}, "its columns do not"),
        (lambda row: row | {"logprobs": row["logprobs"][1:]}, "its columns do not"),
        (lambda row: row | {"logprobs": [-1.0] * len(row["tokens"])}, "column logprobs is not"),
        (
            lambda row: row | {"sampled": ~row["sampled"]},
            "column sampled is not what its turns say",
        ),
        (set_token("versions", 9), "column versions is not what its turns say"),
        (set_token("turn_index", 0), "column turn_index is not what its turns say"),
        (lambda row: row | {"verdict": row["verdict"] | {"cause": None}}, "verdict.cause lacks"),
        (
            lambda row: row | {"verdict": row["verdict"] | {"assertions": [{"name": "a"}]}},
            "column verdict.assertions.passed lacks a value",
        ),
    ],
)
def test_columns_that_disagree_are_named_with_their_trial(tmp_path, rows, change, message):
    table = pa.Table.from_pylist([change(rows[0]), *rows[1:]], store.SCHEMA)
    assert re.search(message, refused(tmp_path, table))


@pytest.mark.parametrize("name", store.ADVANTAGES.names)
def test_damaged_advantages_are_named(tmp_path, name):
    row = {"trial": 1, "chunk": 0} | {name: [0.5, 1.5] for name in store.INFERRED}
    table = pa.Table.from_pylist([row | {name: None}], store.ADVANTAGES)
    pq.write_table(table, store.step_path(tmp_path, 0))
    with pytest.raises(StoreError, match=f"column {name} lacks a value"):
        store.read_advantages(tmp_path, 0)
    pq.write_table(table.drop_columns([name]), store.step_path(tmp_path, 0))
    with pytest.raises(StoreError, match=f"column {name} is missing"):
        store.read_advantages(tmp_path, 0)


def test_a_flipped_bit_is_refused_or_changes_nothing(tmp_path):
    written = [random_trajectory(seed) for seed in range(6)]
    store.write_step(tmp_path, 0, written)
    path = store.step_path(tmp_path, 0)
    data, rng, refused = path.read_bytes(), random.Random(0), 0
    for _ in range(300):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            back = store.read_step(tmp_path, 0)
        except StoreError:
            refused += 1
        else:
            assert_same(tuple(back), tuple(written))
    assert refused > 100
