import os
import sqlite3
from pathlib import Path

import pytest

ROWS = [(i, f"s{i % 4}", 99.5 if i == 7 else (i * 37 % 400) / 10) for i in range(1, 61) if i != 11]


@pytest.fixture
def rows():
    database = sqlite3.connect("file:/app/station.db?mode=ro&immutable=1", uri=True)
    yield lambda query: database.execute(query).fetchall()
    database.close()


def test_early_rows(rows):
    ids = [i for (i,) in rows("SELECT id FROM reading WHERE id < 26 AND id != 11 ORDER BY id")]
    assert ids == [i for i in range(1, 26) if i != 11]


def test_late_rows(rows):
    assert rows("SELECT * FROM reading WHERE id > 25 ORDER BY id") == ROWS[24:]


def test_update_is_there(rows):
    assert rows("SELECT value FROM reading WHERE id = 7") == [(99.5,)]


def test_deleted_row_stays_deleted(rows):
    assert rows("SELECT * FROM reading WHERE id = 11") == []


def test_database_is_sound(rows):
    assert rows("PRAGMA integrity_check") == [("ok",)]


def test_no_log_beside_it():
    assert Path("/app/station.db").read_bytes()[18:20] == b"\1\1"  # not in WAL mode
    assert not {"station.db-wal", "station.db-shm"} & set(os.listdir("/app"))


def test_export():
    text = Path("/app/readings.csv").read_text()
    assert text == "id,sensor,value\n" + "".join(f"{i},{s},{v:.1f}\n" for i, s, v in ROWS)
