"""Whatever a file of a run holds, its audit ends in one line."""

import json
import random

import numpy as np
import pytest
from audit_fixtures import copied, finish, train

from configs import tiny
from t1jax.audit import Offence, audit_run, read_config
from t1jax.checkpoint import CheckpointError, read_host, save_params
from t1jax.command import EXPECTED
from t1jax.experiment import ConfigError

JUNK = ("", "3", '"x"', "null", "[]", "{}", "{", "[" * 100_000, '{"a.b": 1}', '{"step": {}}')


@pytest.mark.parametrize("text", [*JUNK, b"\xff"])
def test_a_config_that_is_none_is_named(tmp_path, text):
    data = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ConfigError, match=r"cannot be read|lacks|unknown key"):
        read_config(tmp_path)


def test_ids_encoded_again_are_no_tito(tmp_path):
    config = tiny.get_config()
    config.episode.history, config.chat_template = "retokenized", "any"
    (tmp_path / "config.json").write_text(config.to_json())
    with pytest.raises(Offence, match="history=retokenized trains on ids that were encoded"):
        audit_run(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *((lambda _, text=text: text, "manifest.json cannot be parsed") for text in JUNK),
        (lambda m: json.dumps(m | {"format": 9}), "has format 9, this version reads"),
        *(
            (lambda m, n=name, v=value: json.dumps(m | {n: v}), "manifest.json names no files or")
            for name in ("files", "leaves")
            for value in (None, [], "x", {"host.json": 3})
        ),
        (lambda m: json.dumps(m | {"files": {}}), "manifest.json does not name host.json"),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path, change, message):
    path = tmp_path / "policy"
    save_params(path, {"w": np.ones(3)}, {})
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(change(manifest))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_host(path)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run") / "tokens"
    finish(train(workdir, **{"train.steps": 3, "train.warmup_steps": 0}))
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "metrics.jsonl", "trajectories/step_000000.parquet"),
        *("advantages/step_000000.parquet", "checkpoints/000002/manifest.json"),
        *("checkpoints/000002/host.json", "checkpoints/000002/arrays/manifest.ocdbt"),
    ],
)
def test_every_damaged_file_ends_in_one_line(run, tmp_path, name):
    path = copied(run, tmp_path) / name
    data = path.read_bytes()
    for damaged in (data[: len(data) // 2], b"", b"[]\n", b"{}\n", random.Random(0).randbytes(999)):
        path.unlink()
        path.write_bytes(damaged)
        with pytest.raises((Offence, *EXPECTED)) as caught:
            audit_run(tmp_path / "run")
        assert "\n" not in str(caught.value)
