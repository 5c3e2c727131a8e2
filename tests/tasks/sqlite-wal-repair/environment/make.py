import os
import shutil
import sqlite3
from pathlib import Path

database = sqlite3.connect("live.db")
database.execute("PRAGMA journal_mode = WAL")
database.execute("PRAGMA wal_autocheckpoint = 0")
database.execute("CREATE TABLE reading (id INTEGER PRIMARY KEY, sensor TEXT NOT NULL, value REAL)")
rows = [(i, f"s{i % 4}", (i * 37 % 400) / 10) for i in range(1, 61)]
database.executemany("INSERT INTO reading VALUES (?, ?, ?)", rows[:25])
database.commit()
database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
database.executemany("INSERT INTO reading VALUES (?, ?, ?)", rows[25:])
database.execute("UPDATE reading SET value = 99.5 WHERE id = 7")
database.execute("DELETE FROM reading WHERE id = 11")
database.commit()
shutil.copy("live.db", "station.db")
wal = bytearray(Path("live.db-wal").read_bytes())
wal[:8] = b"\0" * 8
Path("station.wal.bak").write_bytes(wal)
database.close()
os.remove("live.db")
