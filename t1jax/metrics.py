"""The run's numbers: metrics.jsonl, one JSON object a step, and the same as TensorBoard events.

Keys are sorted and named room/name. Whatever depends on the wall clock is named time/...: without those
two runs of the same seed are equal byte for byte.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary


class MetricsError(ValueError):
    """metrics.jsonl cannot be read: one line with the place."""


class MetricsWriter:
    """Appends to `workdir`/metrics.jsonl and `workdir`/tensorboard; one writer at a time.

    `resumed`: the step of the checkpoint the run goes on from; later lines, and a line torn by a kill,
    are dropped. None begins anew.
    """

    def __init__(self, workdir: Path, resumed: int | None):
        self.path = Path(workdir) / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [] if resumed is None else read_metrics(workdir)
        kept = [line for line in lines if line["step"] <= resumed]
        self._last = kept[-1]["step"] if kept else -1
        tmp = self.path.with_name("tmp-metrics.jsonl")
        with open(tmp, "w") as file:
            file.writelines(_line(line) for line in kept)
            file.flush()
            os.fsync(file.fileno())
        tmp.replace(self.path)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 closed in close()
        first = 0 if resumed is None else resumed + 1
        board = self.path.parent / "tensorboard"
        board.mkdir(exist_ok=True)
        self._board = EventsWriter(str(board / "events"), f".{first}")
        hide_later = SessionLog(
            status=SessionLog.START
        )  # what an earlier process wrote from here on
        self._board.write_event(Event(wall_time=time.time(), step=first, session_log=hide_later))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one line. Raises ValueError naming a metric that is not finite, or a step out of order.

        Where the disk is full metrics.jsonl stays as it was, and OSError names the file.
        """
        if step <= self._last:
            raise ValueError(f"metrics of step {step} after those of step {self._last}")
        values = {name: _number(step, name, value) for name, value in metrics.items()}
        data = _line({"step": step, **values}).encode()
        size = os.fstat(self._file.fileno()).st_size
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            os.ftruncate(self._file.fileno(), size)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._last = step
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=scalars))
        self._board.write_event(event)
        self._board.flush()

    def close(self) -> None:
        self._file.close()
        with contextlib.suppress(OSError):  # every step was flushed, or `write` has raised
            self._board.close()


def read_metrics(workdir: Path) -> list[dict]:
    """The lines of metrics.jsonl in order, without a last line that a kill left torn.

    Raises MetricsError naming the first line that `MetricsWriter` cannot have written.
    """
    path = Path(workdir) / "metrics.jsonl"
    if not path.exists():
        return []
    *lines, _torn = path.read_text(errors="replace").split("\n")
    metrics, last = [], -1
    for number, line in enumerate(lines, 1):
        try:
            metrics.append(_parse(line, last))
        except ValueError as error:
            raise MetricsError(f"{path}, line {number}: {error}: {line[:60]!r}") from None
        last = metrics[-1]["step"]
    return metrics


def _parse(line: str, last: int) -> dict:
    """One line, of a step above `last`. Raises ValueError."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or type(values.get("step")) is not int:
        raise ValueError("no JSON object with a step")
    step = values["step"]
    if step <= last:
        raise ValueError(f"step {step}, after those up to {last}")
    return {name: _number(step, name, value) for name, value in values.items()}


def _number(step: int, name: str, value: float) -> float | int:
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"step {step}: metric {name} is {value}, expected a finite number")
    return value


def _line(metrics: Mapping[str, float]) -> str:
    return json.dumps(metrics, sort_keys=True, allow_nan=False) + "\n"
