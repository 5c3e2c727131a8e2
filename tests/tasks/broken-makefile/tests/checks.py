"""Builds and runs the agent's work as nobody, who can neither end these tests nor write what they report."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path("/app/calc")
HEADER = "enum { OK = 0, DIVISION_BY_ZERO = 2 };\n\n/* Returns OK and sets *result, or says why not. */\n"


def run(folder, *command):
    nobody = {"user": "nobody", "group": "nogroup", "extra_groups": [], "cwd": folder}
    return subprocess.run(command, **nobody, capture_output=True, text=True, timeout=20)


def make(folder, *targets):
    return run(folder, "/usr/bin/make", *targets)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy of the project as it was left, cleaned and built again."""
    folder = tmp_path_factory.mktemp("copy") / "calc"
    shutil.copytree(SOURCE, folder, symlinks=True)
    for each in (folder, *folder.parents[:3]):
        os.chmod(each, 0o755)
    for each in (folder, *folder.iterdir()):
        os.chown(each, 65534, 65534, follow_symlinks=False)
    make(folder, "clean")
    make(folder)
    return folder


def test_it_builds(folder):
    assert (folder / "calc").is_file() and make(folder).returncode == 0


@pytest.mark.parametrize(
    ("a", "operator", "b", "says"),
    [
        ("2", "+", "3", "5\n"),
        ("2", "-", "30", "-28\n"),
        ("6", "x", "7", "42\n"),
        ("-7", "/", "2", "-3\n"),
    ],
)
def test_operator(folder, a, operator, b, says):
    done = run(folder, "./calc", a, operator, b)
    assert (done.returncode, done.stdout) == (0, says)


def test_division_by_zero(folder):
    done = run(folder, "./calc", "1", "/", "0")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "division by zero\n")


def test_only_changes_are_built(folder):
    assert "up to date" in make(folder).stdout
    os.utime(folder / "calc.h", (2**32, 2**32))
    rebuilt = make(folder, "-n").stdout
    assert "main.c" in rebuilt and "apply.c" in rebuilt


def test_flags_and_header_are_kept(folder):
    assert "-O1 -Wall -Werror" in make(folder, "-n", "-B").stdout
    assert (SOURCE / "calc.h").read_text().startswith(HEADER)
    assert "apply(char operator, long a, long b, long *result);" in (SOURCE / "calc.h").read_text()


def test_zz_clean(folder):
    before = set(os.listdir(folder))
    made = {"calc", "main.o", "apply.o"}
    assert make(folder, "clean").returncode == 0
    assert made <= before and set(os.listdir(folder)) == before - made
