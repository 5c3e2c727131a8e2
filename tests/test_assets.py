"""What the repository ships: it loads, it is small, and its record lies beside it."""

import json
import re
from pathlib import Path

from configs import tiny
from t1jax.checkpoint import load_params
from t1jax.experiment import read_experiment
from t1jax.run import abstract_policy, make_chat

ASSETS = Path(tiny.ASSETS)


def test_the_shipped_policy_fits_its_config():
    experiment = read_experiment(tiny.get_config())
    make_chat(experiment)
    load_params(Path(experiment.initial_policy), abstract_policy(experiment))


def test_its_record_says_how_it_was_made():
    record = json.loads((ASSETS / "SFT.json").read_text())
    assert record["command"].startswith("python -m t1jax.sft --config=configs/tiny.py")
    assert record["tokens"] > 1e6 and record["seconds"] > 0
    config = read_experiment(tiny.get_config())
    assert record["experiment"]["model"]["hidden_size"] == config.model.hidden_size
    assert record["experiment"]["sft"]["oracle_share"] == config.sft.oracle_share


def test_assets_are_small_and_know_no_machine():
    files = [path for path in ASSETS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 10e6
    for path in files:
        assert not re.search(rb"/(home|work|root|tmp)/", path.read_bytes()), path
