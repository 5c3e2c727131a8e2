"""Runs every point of a config file's sweep(add), a few at a time, each in a folder of its own.

    python launch/sweep.py --config=configs/ablation_gap.py --out=runs/gap [--parallel=2]

The same command goes on after an interruption: finished points are left alone, others resume. A point's folder
has its log.txt and, once it is finished, result.json, the last line that it printed.
"""

import contextlib
import importlib.util
import operator
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from absl import flags
from ml_collections import ConfigDict, config_flags

from t1jax import command
from t1jax.experiment import ConfigError, write_config

ROOT = Path(__file__).parents[1]
LONGEST_NAME = 255  # bytes, what file systems take
# How a run is stopped, and the seconds each signal has. An interrupt lets it end its engines, but may be lost: in
# a callback, as JAX has one for garbage collection, the exception is ignored.
STOPS = (
    *((signal.SIGINT, 10.0), (signal.SIGINT, 20.0), (signal.SIGTERM, 5.0)),
    (signal.SIGKILL, None),
)
# Becomes a run, which the kernel kills when the thread that started it ends, whatever ends that. Not a preexec_fn:
# Python code between fork and exec may hang in a process with threads.
BOUND = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):  # else that was over before
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
stopping = threading.Event()


class Point(NamedTuple):
    """The whole configuration, the flags that give a run this configuration, and where it runs."""

    config: ConfigDict
    flags: list[str]
    folder: Path


def read_points(path: Path, arg: str, out: Path) -> list[Point]:
    """Those that the file's sweep(add) adds, in order. Raises ConfigError, whatever the file does."""
    module, added = load(path), []
    with errors_of(path):
        module.sweep(lambda **changes: added.append(changes))
    if not added:
        raise ConfigError(f"{path}: its sweep(add) adds no point")
    points = []
    for number, changes in enumerate(added):
        with errors_of(path):
            config = module.get_config(*[arg] if arg else [])
        if not isinstance(config, ConfigDict):
            raise ConfigError(f"{path}: get_config() returns no ConfigDict")
        try:
            config.lock()
            config.update_from_flattened_dict(changes)
            given = [f"--config={path}:{arg}" if arg else f"--config={path}"]
            given += overrides(config, changes)
            check_same(read_flags(given), config, changes)
        except (AttributeError, KeyError, TypeError, ValueError, OSError, flags.Error) as error:
            raise ConfigError(f"{path}, point {number}: {error}") from None
        points.append(Point(config, given, out / folder_name(number, changes)))
    return points


def load(path: Path) -> ModuleType:
    """The config file as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    with errors_of(path):
        spec.loader.exec_module(module)
    for call in ("get_config()", "sweep(add)"):
        if not hasattr(module, call.partition("(")[0]):
            raise ConfigError(f"{path} has no {call}")
    return module


@contextlib.contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Whatever the code of a config file raises becomes a ConfigError that says where."""
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        place = f"{path}, line {lines[-1]}" if lines else path
        raise ConfigError(f"{place}: {type(error).__name__}: {error}") from None


def overrides(config: ConfigDict, changes: dict) -> list[str]:
    """The flags that change a run's configuration, groups first."""
    changed = {}
    for key, value in changes.items():
        group, _, _ = key.rpartition(".")
        if value is None and group:  # which no flag of a number or a text can say
            changed[group] = operator.attrgetter(group)(config).to_dict()
        else:
            changed[key] = value
    return [f"--config.{key}={changed[key]}" for key in sorted(changed, key=len)]


def read_flags(given: list[str]) -> ConfigDict:
    """The configuration of a run that is started with these flags."""
    values = flags.FlagValues()
    config = config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=given)
    values(["run", *given])
    return config.value


def check_same(read: ConfigDict, config: ConfigDict, changes: dict) -> None:
    """Raises ValueError for a change that flags cannot pass on."""
    for key in changes:
        get = operator.attrgetter(key)
        if get(read) != get(config):
            raise ValueError(f"{key} = {get(config)!r} would reach its run as {get(read)!r}")


def folder_name(number: int, changes: dict) -> str:
    """As "07-seed=1-replay=False"; the run's config.json has the whole of it."""
    shown = {k.split(".")[-1]: str(v) for k, v in changes.items()}
    parts = [f"{k}={v}" for k, v in shown.items() if re.fullmatch(r"[^/\s\0]+", v)]
    name = "-".join([f"{number:02d}", *parts])
    return name.encode()[:LONGEST_NAME].decode(errors="ignore")


def run_point(point: Point) -> bool:
    """Trains one point, unless it is finished; whether it is now."""
    folder, result = point.folder, point.folder / "result.json"
    if result.exists():
        return True
    run = ["-m", "t1jax.train", *point.flags, f"--workdir={folder}"]
    with open(folder / "log.txt", "ab") as log, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-c", BOUND, str(os.getpid()), *run],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=log,
            start_new_session=True,  # an interrupt comes from `wait`, not from the terminal
        )
        code = wait(process)
        output.seek(0)
        lines = output.read().splitlines()
    if code or not lines:
        return False
    tmp = result.with_name("tmp-result.json")
    tmp.write_bytes(lines[-1] + b"\n")
    os.replace(tmp, result)
    return True


def wait(process: subprocess.Popen) -> int:
    """Its exit code; a run goes on from its last checkpoint next time, so once `stopping`, it is made to end."""
    while not stopping.is_set():
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(0.5)
    for sign, seconds in STOPS:
        process.send_signal(sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(seconds)


def stop_on_signals() -> None:
    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Under nohup a terminal may close.
        if sign != signal.SIGHUP or signal.getsignal(sign) != signal.SIG_IGN:
            signal.signal(sign, lambda *_: stopping.set())


def main() -> None:
    name, _, arg = CONFIG.value.partition(":")
    path, out = Path(name).resolve(), Path(OUT.value).resolve()
    if not path.is_file():
        raise ConfigError(f"--config: {name} does not exist")
    os.chdir(ROOT)  # what a configuration names is relative to it, here and in the runs
    points = read_points(path, arg, out)
    for point in points:  # refuses folders of other configurations, before anything runs
        point.folder.mkdir(parents=True, exist_ok=True)
        write_config(point.config, point.folder)
    stop_on_signals()

    def go(point: Point) -> Path | None:
        if stopping.is_set():
            return None
        good = run_point(point)
        print(
            f"{'finished' if good else 'FAILED  '} {point.folder.name}", file=sys.stderr, flush=True
        )
        return None if good else point.folder / "log.txt"

    with ThreadPoolExecutor(PARALLEL.value) as pool:
        failed = [log for log in pool.map(go, points) if log]
    if stopping.is_set():
        command.fail("interrupted; the same command goes on")
    if failed:
        command.fail(f"{len(failed)} of {len(points)} points failed, the first: {failed[0]}")


if __name__ == "__main__":
    CONFIG = flags.DEFINE_string("config", None, "Experiment file with a sweep.", required=True)
    OUT = flags.DEFINE_string("out", None, "The folder of all points.", required=True)
    PARALLEL = flags.DEFINE_integer("parallel", 1, "Points at a time.", lower_bound=1)
    command.run(main)
