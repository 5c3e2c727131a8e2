"""Runs the agent's work as nobody, who can neither end these tests nor write what they report."""

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

DIGEST = "f025c1f1d360d050ddf7c3a85e1807a8db9dc40c45ee1f623325ce90eb9b8614"
PACKED, UNPACK, ORIGINAL = Path("/app/packed"), Path("/app/unpack"), Path("/app/readings.txt")


@pytest.fixture(scope="module")
def unpacked():
    """What the program makes of the packed bytes, in an empty folder and without the original."""
    packed, mode = PACKED.read_bytes(), ORIGINAL.stat().st_mode
    nobody = {"user": "nobody", "group": "nogroup", "extra_groups": [], "cwd": "/proc"}
    os.chmod(ORIGINAL, 0)
    try:
        done = subprocess.run([UNPACK], **nobody, input=packed, capture_output=True, timeout=20)
    finally:
        os.chmod(ORIGINAL, mode)
    return done.stdout


def test_original_is_kept():
    assert hashlib.sha256(ORIGINAL.read_bytes()).hexdigest() == DIGEST


def test_packed_is_small_enough():
    assert 0 < PACKED.lstat().st_size <= 16000


def test_program_is_small_enough():
    assert 0 < UNPACK.lstat().st_size <= 4000 and os.access(UNPACK, os.X_OK)


def test_length(unpacked):
    assert len(unpacked) == ORIGINAL.stat().st_size


def test_first_lines(unpacked):
    assert unpacked.splitlines()[:100] == ORIGINAL.read_bytes().splitlines()[:100]


def test_round_trip(unpacked):
    assert hashlib.sha256(unpacked).hexdigest() == DIGEST
