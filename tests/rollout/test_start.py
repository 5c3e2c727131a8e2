"""Fleets whose engines do not start, or that end before they have weights."""

import asyncio
import dataclasses
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from fault_fixtures import MODEL, ONE, STREAM, group_of, kill, until
from fleet_fixtures import FLEET, make_fleet

from t1jax.model.lm import init_policy
from t1jax.types import SamplerError


@pytest.fixture
def unstarted(tmp_path):
    """A function that makes a fleet of one engine and closes it at the end."""
    fleets = []

    def make(fleet=ONE, **changes):
        fleets.append(make_fleet(MODEL, tmp_path / "engines", fleet=fleet, **changes))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()


@pytest.fixture(scope="module")
def params():
    return init_policy(MODEL, jax.random.key(0))


def test_a_load_that_is_broken_off_says_so(unstarted, params):
    def fails(params, tokens):
        raise ZeroDivisionError

    fleet = unstarted(dataclasses.replace(ONE, urls="http://127.0.0.1:9"), probe=fails)
    with pytest.raises(ZeroDivisionError):
        fleet.load(params, 5)
    assert fleet._members[0].why == "its load of weights 5 was broken off"


@pytest.mark.engine
def test_an_engine_killed_while_it_starts_is_named_with_its_log(unstarted, params):
    fleet = unstarted()
    member = fleet._members[0]

    def killer():
        until(lambda: member.server, 60)
        time.sleep(1)
        kill(member)

    thread = threading.Thread(target=killer)
    thread.start()
    with pytest.raises(SamplerError, match=r"engine 0: the server ended with -9: .*engine-0.log"):
        fleet.load(params, 1)
    thread.join()
    assert fleet.version == -1 and not group_of(member)


@pytest.mark.engine
def test_an_engine_that_is_not_ready_in_time_is_named_with_its_log(unstarted, params):
    server = dataclasses.replace(FLEET.server, start_timeout_s=2.0)
    fleet = unstarted(dataclasses.replace(ONE, server=server))
    with pytest.raises(SamplerError, match=r"engine 0: no server after 2 s: .*engine-0.log"):
        fleet.load(params, 1)
    until(lambda: not group_of(fleet._members[0]), 10)


@pytest.mark.engine
def test_why_a_server_did_not_start_is_read_from_its_own_part_of_the_log(unstarted, params):
    server = dataclasses.replace(FLEET.server, flags="--no-such-flag")
    fleet = unstarted(dataclasses.replace(ONE, server=server))
    log = fleet._members[0].log
    log.write_text("OldError: of an earlier server\n")
    with pytest.raises(SamplerError, match=r"engine 0: the server ended with 2: ") as caught:
        fleet.load(params, 1)
    assert "OldError" not in str(caught.value) and "no-such-flag" in str(caught.value)


def test_a_full_disk_is_told(tmp_path):
    code = """if True:
        import jax, sys
        from fleet_fixtures import QWEN3, make_fleet
        from t1jax.model.lm import init_policy
        from t1jax.types import SamplerError
        fleet = make_fleet(QWEN3, sys.argv[1])
        try:
            fleet.load(init_policy(QWEN3, jax.random.key(0)), 3)
        except SamplerError as error:
            print(fleet.version, error)
        finally:
            fleet.close()"""
    script = 'mount -t tmpfs -o size=64k none "$1" && "$2" -c "$3" "$1"'
    namespaces = "-m" if os.geteuid() == 0 else "-rm"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        ["unshare", namespaces, "sh", "-c", script, "", tmp_path, sys.executable, code],
        env=os.environ | {"PYTHONPATH": f"{root}:{root / 'tests'}", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    said = f"-1 the weights cannot be written to {tmp_path}/weights-3: No space left on device"
    assert done.stdout.strip() == said


def test_a_folder_that_cannot_be_written_to_is_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SamplerError, match=r"the engines' folder .*file/engines cannot be written"):
        make_fleet(MODEL, tmp_path / "file" / "engines")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_has_died(unstarted, params):
    entered = threading.Event()

    def slow(params, tokens):
        entered.set()
        time.sleep(1)
        return np.zeros(len(tokens) - 1, np.float32)

    fleet = unstarted(probe=slow)
    errors = []

    def load():
        try:
            fleet.load(params, 1)
        except SamplerError as error:
            errors.append(str(error))

    thread = threading.Thread(target=load)
    thread.start()
    assert entered.wait(60)
    fleet._loop.call_soon_threadsafe(sys.exit)
    thread.join(30)
    assert errors == ["the fleet is closed"]
    with pytest.raises(SamplerError, match="the fleet is closed"):
        asyncio.run(fleet.sample(1, 0, STREAM, 0, 4))
