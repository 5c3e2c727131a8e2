import random
import zipfile
from pathlib import Path

import pytest

NAMES = (
    "notes/one.txt",
    "notes/two.txt",
    "plan.csv",
    "photos/raw.bin",
    "photos/empty.txt",
    "z/last.txt",
)
LOST = ["plan.csv", "z/last.txt"]
RESTORED = Path("/app/restored")
rng = random.Random(3)
TEXT = {name: "".join(f"{name} {i} {rng.random()}\n" for i in range(60)) for name in NAMES}
TEXT["photos/empty.txt"] = ""
WHOLE = [name for name in NAMES if name not in LOST]


@pytest.mark.parametrize("name", WHOLE)
def test_member(name):
    assert (RESTORED / name).read_text() == TEXT[name]


def test_nothing_else_is_restored():
    found = sorted(str(p.relative_to(RESTORED)) for p in RESTORED.rglob("*") if not p.is_dir())
    assert found == sorted(WHOLE)


def test_lost():
    assert Path("/app/lost.txt").read_text().split() == LOST


def test_repaired_archive():
    with zipfile.ZipFile("/app/repaired.zip") as archive:
        assert archive.testzip() is None and sorted(archive.namelist()) == sorted(WHOLE)
        assert all(archive.read(name).decode() == TEXT[name] for name in WHOLE)


def test_source_is_kept():
    data = Path("/app/backup.zip").read_bytes()
    assert data.startswith(b"PK\3\4") and data.count(b"PK\3\4") == len(NAMES)
    assert not zipfile.is_zipfile("/app/backup.zip")
