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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from absl import flags

from t1jax import command
from t1jax.experiment import ConfigError

ROOT = Path(__file__).parents[1]
running: set[subprocess.Popen] = set()


def read_points(config: str) -> list[dict]:
    """The points that the file's sweep(add) adds, in order."""
    path = Path(config.partition(":")[0])
    if not path.is_file():
        raise ConfigError(f"--config: {path} does not exist")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "sweep"):
        raise ConfigError(f"{path} has no sweep(add)")
    points: list[dict] = []
    module.sweep(lambda **changes: points.append(changes))
    return points


def folder_name(number: int, point: dict) -> str:
    """As "07-seed=1-replay=False"; the run's config.json has the whole of it."""
    parts = [f"{k.split('.')[-1]}={v}" for k, v in point.items() if "/" not in str(v) and v != ""]
    return "-".join([f"{number:02d}", *parts])


def run_point(config: str, folder: Path, point: dict) -> bool:
    """Trains one point, unless it is finished; whether it is now."""
    result = folder / "result.json"
    if result.exists():
        return True
    folder.mkdir(parents=True, exist_ok=True)
    changes = [f"--config.{name}={value}" for name, value in point.items()]
    arguments = [f"--config={config}", f"--workdir={folder}", *changes]
    with open(folder / "log.txt", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "t1jax.train", *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        running.add(process)
        out, _ = process.communicate()
        running.discard(process)
    if process.returncode:
        return False
    tmp = result.with_name("tmp-result.json")
    tmp.write_bytes(out.splitlines()[-1] + b"\n")
    tmp.replace(result)
    return True


def stop(*_) -> None:
    """Ends what runs; each point resumes from its last checkpoint next time."""
    for process in list(running):
        process.send_signal(signal.SIGINT)
    os._exit(1)


def main() -> None:
    points = read_points(CONFIG.value)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)

    def go(numbered: tuple[int, dict]) -> str | None:
        folder = Path(OUT.value).resolve() / folder_name(*numbered)
        good = run_point(CONFIG.value, folder, numbered[1])
        print(f"{'finished' if good else 'FAILED  '} {folder.name}", file=sys.stderr, flush=True)
        return None if good else str(folder / "log.txt")

    with ThreadPoolExecutor(PARALLEL.value) as pool:
        failed = [log for log in pool.map(go, enumerate(points)) if log]
    if failed:
        command.fail(f"{len(failed)} of {len(points)} points failed, the first: {failed[0]}")


if __name__ == "__main__":
    CONFIG = flags.DEFINE_string("config", None, "Experiment file with a sweep.", required=True)
    OUT = flags.DEFINE_string("out", None, "The folder of all points.", required=True)
    PARALLEL = flags.DEFINE_integer("parallel", 1, "Points at a time.", lower_bound=1)
    command.run(main)
