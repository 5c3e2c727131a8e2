#!/bin/bash
# A write-ahead log begins with its magic number and its format's version.
set -e
cd /app
cp station.wal.bak station.db-wal
printf '\x37\x7f\x06\x82\x00\x2d\xe2\x18' | dd of=station.db-wal bs=1 conv=notrunc status=none
sqlite3 station.db "PRAGMA wal_checkpoint(TRUNCATE); PRAGMA journal_mode = DELETE;"
{
  echo id,sensor,value
  sqlite3 -separator , station.db "SELECT id, sensor, printf('%.1f', value) FROM reading ORDER BY id"
} >readings.csv
