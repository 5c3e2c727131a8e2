"""Runs the agent's work as nobody, who can neither end these tests nor write what they report."""

import os
import subprocess

import pytest

SOURCE = "/app/poly/primes.c"
CASES = [("30", "2 3 5 7 11 13 17 19 23 29\n"), ("2", "2\n"), ("1", "\n"), ("49", None)]


def run(*command):
    nobody = {"user": "nobody", "group": "nogroup", "extra_groups": [], "cwd": "/"}
    done = subprocess.run(command, **nobody, capture_output=True, text=True, timeout=10)
    assert done.returncode == 0, done.stderr
    return done.stdout


def primes(n):
    return " ".join(str(p) for p in range(2, n + 1) if all(p % d for d in range(2, p))) + "\n"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("build")
    os.chown(folder, 65534, 65534)
    for each in (folder, *folder.parents[:2]):
        os.chmod(each, 0o755)
    run("/usr/bin/gcc", "-o", f"{folder}/primes", SOURCE)
    return f"{folder}/primes"


@pytest.mark.parametrize(("n", "says"), CASES)
def test_python(n, says):
    assert run("/usr/bin/python3", "-I", SOURCE, n) == (says or primes(int(n)))


@pytest.mark.parametrize(("n", "says"), CASES)
def test_c(program, n, says):
    assert run(program, n) == (says or primes(int(n)))


def test_one_source_and_nothing_else():
    assert os.listdir("/app/poly") == ["primes.c"] and not os.path.islink(SOURCE)
