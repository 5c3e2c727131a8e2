"""Bad config files are one line before anything runs; a stopped sweep leaves no run behind."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from launch import sweep
from t1jax.experiment import ConfigError

ROOT = Path(__file__).parent.parent
TINY = "from configs.tiny import get_config\n"


def read(folder: Path, text: str, arg: str = "") -> list[sweep.Point]:
    (folder / "file.py").write_text(text)
    return sweep.read_points(folder / "file.py", arg, folder / "runs")


def adding(*points: dict) -> str:
    return f"{TINY}def sweep(add):\n    for point in {list(points)!r}:\n        add(**point)\n"


@pytest.mark.parametrize(
    ("text", "arg", "message"),
    [
        (adding({"seed": 1}), "bogus", "ValueError: unknown config argument 'bogus'; there are"),
        ("def get_config(:", "", r"file\.py: SyntaxError: invalid syntax \(file\.py, line 1\)"),
        ("\n1 / 0", "", r"file\.py, line 2: ZeroDivisionError: division by zero"),
        ("import none_such", "", r"file\.py, line 1: ModuleNotFoundError: .*none_such"),
        ("def sweep(add): ...", "", r"has no get_config\(\)"),
        ("def get_config(): ...", "", r"has no sweep\(add\)"),
        ("def get_config(): ...\ndef sweep(add): add()", "", "returns no ConfigDict"),
        ("def get_config(): ...\ndef sweep(add): add()", "debug", "TypeError: get_config"),
        ("def get_config(): {}[0]\ndef sweep(add): add()", "", r"line 1: KeyError: 0"),
        ("def get_config(): ...\ndef sweep(add): {}[0]", "", r"line 2: KeyError: 0"),
        (adding(), "", r"sweep\(add\) adds no point"),
        (adding({"seed": 1}, {"sede": 1}), "", 'point 1: .*"sede" does not exist'),
        (adding({"seed": 1.5}), "", "point 0: .*cannot be casted"),
        (adding({"seed": True}), "", "point 0: .*seed=True"),
        (adding({"chat_template": None}), "", "chat_template = None would reach its run as 'None'"),
        ("nan = float('nan')\n" + adding({"reward.scale": float("nan")}), "", "= nan would"),
    ],
)
def test_a_bad_config_file_is_one_error(tmp_path, text, arg, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text, arg)


def test_a_bad_argument_creates_nothing(tmp_path):
    done = run("--config=configs/ablation_gap.py:bogus", f"--out={tmp_path / 'runs'}", cwd=ROOT)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ") and "'bogus'" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"ppo.clip_low": None, "ppo.lam": 0.5},
        {"ppo.lam": 0.5, "ppo.clip_high": None, "ppo.clip_low": None},
        {"actor_optim.lr": 1e-5, "ppo.gamma": 1, "ppo.replay": False},
        {"chat_template": "", "tasks.train": "a, b's\n=c", "fleet.server.flags": "--x 'y z'"},
        {"train.buckets": (192,), "engine.prefill_buckets": [16, 64]},
    ],
)
def test_a_run_reads_what_its_point_says(tmp_path, changes):
    (point,) = read(tmp_path, adding(changes))
    assert sweep.read_flags(point.flags).to_dict() == point.config.to_dict()


def test_folder_names():
    assert sweep.folder_name(7, {"seed": 1, "a.b": "", "c": "x y", "d": "e/f"}) == "07-seed=1"
    for letter in "xé":
        name = sweep.folder_name(7, {"tasks.train": letter * 300})
        assert name.startswith(f"07-train={letter}") and 254 <= len(name.encode()) <= 255


@pytest.mark.parametrize(
    ("hears", "code"),
    [
        ("lambda *_: os._exit(3)", 3),
        ("lambda *_: heard.append(1) or len(heard) > 1 and os._exit(4)", 4),  # at the second time
        ("signal.SIG_IGN", -signal.SIGTERM),
        ("(signal.signal(signal.SIGTERM, signal.SIG_IGN), signal.SIG_IGN)[1]", -signal.SIGKILL),
    ],
)
def test_a_run_that_does_not_stop_is_made_to(monkeypatch, hears, code):
    seconds = (0.5, 0.5, 0.5, None)
    stops = [(sign, s) for (sign, _), s in zip(sweep.STOPS, seconds, strict=True)]
    monkeypatch.setattr(sweep, "STOPS", stops)
    monkeypatch.setattr(sweep, "stopping", threading.Event())
    program = f"""
import os, signal, time
heard = []
signal.signal(signal.SIGINT, {hears})
print(flush=True)
while True:
    time.sleep(0.1)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        process.stdout.readline()
        sweep.stopping.set()
        assert sweep.wait(process) == code


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "launch" / "sweep.py"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


def processes(word: str) -> list[int]:
    """Those that have `word` in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if word.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def until(true, seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.05)


@pytest.mark.slow
def test_a_relative_config_is_the_same_file_for_the_runs(tmp_path):
    (tmp_path / "file.py").write_text(adding({"episode.history": "none"}))
    done = run("--config=file.py:debug", "--out=runs", cwd=tmp_path)
    assert done.returncode == 1 and "1 of 1 points failed" in done.stderr
    log = tmp_path / "runs" / "00-history=none" / "log.txt"
    assert "episode.history = 'none' is not" in log.read_text()


@pytest.fixture
def sweeping(tmp_path):
    """(sweep, word): one that has just started its runs, which have `word` in their command lines."""
    (tmp_path / "file.py").write_text(adding(*[{"seed": seed} for seed in range(3)]))
    word = f"--workdir={tmp_path}"
    command = (
        *("env", "--default-signal=HUP,INT", sys.executable, "launch/sweep.py", "--parallel=2"),
        *(f"--config={tmp_path / 'file.py'}:debug", f"--out={tmp_path / 'runs'}"),
    )
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: len(processes(word)) == 2)
        yield process, word
        process.kill()
        for pid in processes(word):  # none, unless the test fails
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_runs_that_are_importing(sweeping, sign):
    process, word = sweeping
    process.send_signal(sign)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 1 and err.endswith("interrupted; the same command goes on\n")
    assert not processes(word)


@pytest.mark.slow
def test_a_killed_sweep_leaves_no_runs(sweeping):
    process, word = sweeping
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: not processes(word), 10.0)
