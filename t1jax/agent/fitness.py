"""Whether tasks are fit to be trained on, as `t1jax.preflight` found, and which a run leaves out for that."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from t1jax.agent.task import TaskError
from t1jax.types import Task


@dataclasses.dataclass(frozen=True)
class Fitness:
    """What was found out about one task. `problem` is "" where it is fit.

    `digest`: of the folder that was checked, see `digest`. `assertions`: in the oracle's report; `noop`: how many
    of them pass when nothing is done; both None without a report. `seconds`: both runs together, sandboxes
    included; `size`: bytes of the folder.
    """

    task: str
    family: str
    digest: str
    sandbox: str
    assertions: int | None
    noop: int | None
    seconds: float
    size: int
    problem: str


def digest(task: Task) -> tuple[str, int]:
    """16 hexadecimal digits over names, modes and contents of a task's folder, and its bytes."""
    sha, size = hashlib.sha256(), 0
    for path in sorted(task.path.rglob("*")):
        name = str(path.relative_to(task.path))
        if path.is_symlink():
            sha.update(f"link {name}\0{path.readlink()}\0".encode("utf-8", "surrogateescape"))
        elif path.is_file():
            data = path.read_bytes()
            mode = path.stat().st_mode & 0o777
            sha.update(f"file {name}\0{mode:o} {len(data)}\0".encode("utf-8", "surrogateescape"))
            sha.update(data)
            size += len(data)
    return sha.hexdigest()[:16], size


def read_lines(text: str, path: Path) -> list[Fitness]:
    """One JSON object a line. Raises TaskError naming `path` and the line."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            found.append(Fitness(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise TaskError(f"{path}, line {number}: no record of a preflight ({error})") from None
    return found


def fit_tasks(tasks: Sequence[Task], found: Iterable[Fitness], path: Path) -> list[Task]:
    """Those without a problem, in order. `path` of the records is for messages.

    Raises TaskError for a task that was not checked, or was changed since, and where none is fit.
    """
    checked = {f.task: f for f in found}
    fit = []
    for task in tasks:
        record = checked.get(task.name)
        if record is None or record.digest != digest(task)[0]:
            why = "was not checked" if record is None else "is not as it was when it was checked"
            raise TaskError(
                f"{path}: {task.path} {why}; run t1jax.preflight on its folder once more"
            )
        if not record.problem:
            fit.append(task)
    if not fit:
        raise TaskError(f"{path}: none of {len(tasks)} tasks is fit, the first: {record.problem}")
    return fit
