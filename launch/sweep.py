"""Runs every point of a config file's sweep(add), a few at a time, each in a folder of its own.

    python launch/sweep.py --config=configs/ablation_gap.py --out=runs/gap [--parallel=2]

The same command goes on after an interruption: finished points are left alone, others resume. A point's folder
has its log.txt and, once it is finished, result.json, the last line that it printed.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from absl import flags
from ml_collections import ConfigDict

from t1jax import command
from t1jax.experiment import ConfigError, write_config

ROOT = Path(__file__).parents[1]
running: set[subprocess.Popen] = set()
stopping = threading.Event()


class Point(NamedTuple):
    """What changes, the whole configuration with it, and where it runs."""

    changes: dict
    config: ConfigDict
    folder: Path


def read_points(name: str, out: Path) -> list[Point]:
    """Those that the file's sweep(add) adds, in order."""
    path, _, arg = name.partition(":")
    if not Path(path).is_file():
        raise ConfigError(f"--config: {path} does not exist")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "sweep"):
        raise ConfigError(f"{path} has no sweep(add)")
    added: list[dict] = []
    module.sweep(lambda **changes: added.append(changes))
    points = []
    for number, changes in enumerate(added):
        config = module.get_config(*[arg] if arg else [])
        try:
            config.lock()
            config.update_from_flattened_dict(changes)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}, point {number}: {error}") from None
        points.append(Point(changes, config, out / folder_name(number, changes)))
    return points


def folder_name(number: int, changes: dict) -> str:
    """As "07-seed=1-replay=False"; the run's config.json has the whole of it."""
    shown = {k.split(".")[-1]: str(v) for k, v in changes.items()}
    parts = [f"{k}={v}" for k, v in shown.items() if v and not set(v) & set("/ ")]
    return "-".join([f"{number:02d}", *parts])


def run_point(name: str, point: Point) -> bool:
    """Trains one point, unless it is finished; whether it is now."""
    folder, result = point.folder, point.folder / "result.json"
    if result.exists():
        return True
    changes = [f"--config.{key}={value}" for key, value in point.changes.items()]
    arguments = [f"--config={name}", f"--workdir={folder}", *changes]
    with open(folder / "log.txt", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "t1jax.train", *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # an interrupt comes from here, once
        )
        running.add(process)
        if stopping.is_set():
            process.send_signal(signal.SIGINT)
        out, _ = process.communicate()
        running.discard(process)
    if process.returncode:
        return False
    tmp = result.with_name("tmp-result.json")
    tmp.write_bytes(out.splitlines()[-1] + b"\n")
    os.replace(tmp, result)
    return True


def stop(*_) -> None:
    """Ends what runs; each point goes on from its last checkpoint next time."""
    stopping.set()
    for process in list(running):
        process.send_signal(signal.SIGINT)


def main() -> None:
    points = read_points(CONFIG.value, Path(OUT.value).resolve())
    for point in points:  # refuses folders of other configurations, before anything runs
        point.folder.mkdir(parents=True, exist_ok=True)
        write_config(point.config, point.folder)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)

    def go(point: Point) -> Path | None:
        if stopping.is_set():
            return None
        good = run_point(CONFIG.value, point)
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
