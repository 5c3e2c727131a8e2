"""Harbor task folders: task.toml, instruction.md, environment/, tests/test.sh and, optional, solution/.

Reads what Terminal-Bench 2, RST and TermiGen use, the deprecated keys included (`memory = "2G"`,
`storage`, `allow_internet`). Keys that nothing here acts on are kept in `unknown_keys`, never fatal.
"""

import math
import re
import tomllib
from pathlib import Path

from t1jax.types import Task

REQUIRED = ("task.toml", "instruction.md", "tests/test.sh")
SECTIONS = {
    "agent": {"timeout_sec"},
    "verifier": {"timeout_sec", "env", "live_processes"},
    "environment": {
        *("build_timeout_sec", "docker_image", "cpus", "memory_mb", "storage_mb", "memory"),
        *("storage", "workdir", "network_mode", "allow_internet", "env"),
    },
    "solution": {"env"},
}
FREE = {"version", "schema_version", "metadata", "task"}  # informational: no key in them is unknown
NETWORKS = ("public", "no-network", "allowlist")
MAX_NUMBER = 1e12  # of seconds, MiB or cores
MIB_PER_UNIT = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}


class TaskError(ValueError):
    """A folder that is no usable task: one line with the path and what is wrong."""


def load_tasks(folder: Path) -> list[Task]:
    """The tasks in the subfolders of `folder` (hidden ones left out), sorted by name.

    Raises TaskError when there is none, or for the first that is not a task.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise TaskError(f"{folder}: no such folder of tasks")
    paths = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not paths:
        raise TaskError(f"{folder}: holds no task folders; `python -m t1jax.tasks` makes some")
    return [load_task(path) for path in paths]


def load_task(path: Path) -> Task:
    """Reads one Harbor task folder. Times in seconds, sizes in MiB; Harbor's defaults where unset.

    The name is the folder's. Raises TaskError.
    """
    path = Path(path)
    missing = [name for name in REQUIRED if not (path / name).is_file()]
    if missing:
        raise TaskError(f"{path}: not a task folder, {', '.join(missing)} missing")
    try:
        config = tomllib.loads((path / "task.toml").read_text("utf-8"))
        instruction = (path / "instruction.md").read_text("utf-8").strip()
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: task.toml or instruction.md cannot be read: {error}") from error
    if not instruction:
        raise TaskError(f"{path}: instruction.md is empty")
    read = _Reader(path, config)
    return Task(
        name=path.name,
        path=path,
        instruction=instruction,
        environment=path / "environment",
        tests=path / "tests",
        solution=path / "solution" if (path / "solution/solve.sh").is_file() else None,
        workdir=read.text("environment", "workdir"),
        agent_timeout_s=read.number("agent", "timeout_sec", 600.0),
        verifier_timeout_s=read.number("verifier", "timeout_sec", 600.0),
        live_processes=read.switch("verifier", "live_processes", False),
        build_timeout_s=read.number("environment", "build_timeout_sec", 600.0),
        docker_image=read.text("environment", "docker_image"),
        cpus=read.number("environment", "cpus", 1.0),
        memory_mb=read.mebibytes("memory_mb", "memory", 2048),
        storage_mb=read.mebibytes("storage_mb", "storage", 10240),
        network=read.network(),
        env=read.env("environment"),
        verifier_env=read.env("verifier"),
        solution_env=read.env("solution"),
        metadata=read.section("metadata"),
        unknown_keys=read.unknown_keys(),
    )


class _Reader:
    """Typed access to task.toml; every complaint names the file and the key."""

    def __init__(self, path: Path, config: dict):
        self._path, self._config = path, config

    def section(self, name: str) -> dict:
        section = self._config.get(name, {})
        return section if isinstance(section, dict) else self._refuse(name, section, "a table")

    def number(self, section: str, key: str, default: float) -> float:
        value = self.section(section).get(key, default)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not 0 < value < MAX_NUMBER:
            self._refuse(f"{section}.{key}", value, "a positive number")
        return float(value)

    def text(self, section: str, key: str) -> str | None:
        value = self.section(section).get(key)
        if value is not None and not isinstance(value, str):
            self._refuse(f"{section}.{key}", value, "a string")
        return value or None

    def mebibytes(self, key: str, deprecated: str, default: int) -> int:
        """`key` in MiB, or the deprecated form: a number of MiB or a string with a unit ("2G")."""
        section = self.section("environment")
        if key in section or not isinstance(section.get(deprecated), str):
            used = key if key in section else deprecated
            return math.ceil(self.number("environment", used, default))
        match = re.fullmatch(r"([\d.]+)\s*([KMGT])i?B?", section[deprecated].strip(), re.IGNORECASE)
        try:
            size = math.ceil(float(match[1]) * MIB_PER_UNIT[match[2].upper()])
        except (TypeError, ValueError, OverflowError):
            size = 0
        if not 0 < size < MAX_NUMBER:
            self._refuse(f"environment.{deprecated}", section[deprecated], 'a size such as "2G"')
        return size

    def switch(self, section: str, key: str, default: bool) -> bool:
        value = self.section(section).get(key, default)
        if not isinstance(value, bool):
            self._refuse(f"{section}.{key}", value, "true or false")
        return value

    def network(self) -> str:
        section = self.section("environment")
        internet = self.switch("environment", "allow_internet", True)
        mode = section.get("network_mode", "public" if internet else "no-network")
        if mode not in NETWORKS:
            self._refuse("environment.network_mode", mode, f"one of {', '.join(NETWORKS)}")
        return mode

    def env(self, section: str) -> dict[str, str]:
        env = self.section(section).get("env", {})
        if not isinstance(env, dict) or not all(isinstance(v, str) for v in env.values()):
            self._refuse(f"{section}.env", env, "a table of strings")
        return env

    def unknown_keys(self) -> tuple[str, ...]:
        """Dotted names of the keys that nothing acts on, sorted."""
        unknown = {name for name in self._config if name not in SECTIONS.keys() | FREE}
        for name, known in SECTIONS.items():
            unknown |= {f"{name}.{key}" for key in self.section(name) if key not in known}
        return tuple(sorted(unknown))

    def _refuse(self, key: str, value: object, wanted: str):
        raise TaskError(f"{self._path / 'task.toml'}: {key} = {value!r} is not {wanted}")
