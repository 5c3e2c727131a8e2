import json
from pathlib import Path

import pytest

MERGED = {
    ("server", "host"): "0.0.0.0",
    ("server", "port"): 8443,
    ("server", "debug"): True,
    ("server", "name"): "7",
    ("server", "peers"): ["a", "b"],
    ("store", "path"): "/mnt/fast",
    ("store", "size"): "010",
    ("store", "sync"): True,
    ("store", "limit"): "100",
    ("cache", "max_items"): -5,
}


@pytest.fixture
def merged():
    return json.loads(Path("/app/merged.json").read_text())


@pytest.mark.parametrize("key", MERGED, ids=".".join)
def test_key(merged, key):
    assert json.dumps(merged[key[0]][key[1]]) == json.dumps(MERGED[key])  # 1 is not true


def test_no_other_keys(merged):
    assert {(section, key) for section in merged for key in merged[section]} == set(MERGED)


def test_no_empty_sections(merged):
    assert set(merged) == {"server", "store", "cache"}


def test_conflicts():
    lines = Path("/app/conflicts.txt").read_text().splitlines()
    assert lines == ["server.debug: local", "server.port: site", "store.path: local"]
