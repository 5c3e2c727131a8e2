import json
import math
import resource
import struct

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from t1jax.metrics import MetricsError, MetricsWriter, read_metrics
from t1jax.plot import PANELS, plot_run, running_mean


def write_run(workdir, steps, resumed=None, seconds=1.0):
    writer = MetricsWriter(workdir, resumed)
    for step in steps:
        writer.write(
            step, {"time/step_s": seconds, "ppo/kl": step / 8, "agent/turns": np.float32(2)}
        )
    writer.close()


def test_a_line_a_step_with_sorted_keys(tmp_path):
    write_run(tmp_path, [0, 1])
    first, second = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert first == '{"agent/turns": 2.0, "ppo/kl": 0.0, "step": 0, "time/step_s": 1.0}'
    assert json.loads(second)["ppo/kl"] == 0.125


def read_events(workdir):
    """The events of all files: each is a length, its checksum, the message and the message's checksum."""
    for path in sorted((workdir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("Q", data[:8])
            yield Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def test_tensorboard_has_the_same_and_hides_what_is_done_again(tmp_path):
    write_run(tmp_path, [0, 1])
    write_run(tmp_path, [1], resumed=0)
    events = list(read_events(tmp_path))
    steps = [event.step for event in events if event.HasField("summary")]
    assert steps == [0, 1, 1]
    values = {value.tag: value.simple_value for value in events[-1].summary.value}
    assert values == {"agent/turns": 2.0, "ppo/kl": 0.125, "time/step_s": 1.0}
    assert [event.step for event in events if event.HasField("session_log")] == [0, 1]


def test_a_line_the_disk_has_no_room_for_leaves_no_trace(tmp_path):
    writer = MetricsWriter(tmp_path, None)
    writer.write(0, {"ppo/kl": 0.5})
    before = writer.path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))  # room for a part of it
    try:
        with pytest.raises(OSError, match=r"metrics\.jsonl"):
            writer.write(1, {"ppo/kl": 0.5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert writer.path.read_bytes() == before
    writer.write(1, {"ppo/kl": 0.25})
    writer.close()
    assert [line["ppo/kl"] for line in read_metrics(tmp_path)] == [0.5, 0.25]


def test_two_runs_are_equal_without_wall_clock_fields(tmp_path):
    def timeless(workdir):
        return [
            {name: value for name, value in line.items() if not name.startswith("time/")}
            for line in read_metrics(workdir)
        ]

    write_run(tmp_path / "a", range(3), seconds=1.0)
    write_run(tmp_path / "b", range(3), seconds=2.0)
    assert timeless(tmp_path / "a") == timeless(tmp_path / "b")
    assert read_metrics(tmp_path / "a") != read_metrics(tmp_path / "b")


def test_resuming_drops_later_lines_and_ends_like_an_uninterrupted_run(tmp_path):
    write_run(tmp_path / "whole", range(6))
    write_run(tmp_path / "cut", range(5))
    with open(tmp_path / "cut" / "metrics.jsonl", "a") as file:
        file.write('{"agent/turns": 2.0, "pp')  # killed while writing
    assert [line["step"] for line in read_metrics(tmp_path / "cut")] == [0, 1, 2, 3, 4]
    write_run(tmp_path / "cut", range(3, 6), resumed=2)
    whole, cut = (tmp_path / name / "metrics.jsonl" for name in ("whole", "cut"))
    assert whole.read_bytes() == cut.read_bytes()


def test_beginning_anew_forgets_the_old_run(tmp_path):
    write_run(tmp_path, range(4))
    write_run(tmp_path, range(2))
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, "high", None])
def test_a_metric_that_is_no_finite_number_is_named(tmp_path, bad):
    writer = MetricsWriter(tmp_path, None)
    with pytest.raises(ValueError, match="step 4: metric ppo/kl is"):
        writer.write(4, {"ppo/kl": bad})
    writer.close()
    assert read_metrics(tmp_path) == []


def test_steps_only_go_up(tmp_path):
    writer = MetricsWriter(tmp_path, None)
    writer.write(3, {})
    with pytest.raises(ValueError, match="step 3 after those of step 3"):
        writer.write(3, {})
    writer.close()


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2"):
        MetricsWriter(tmp_path, 2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "no JSON object with a step"),
        ("3", "no JSON object with a step"),
        ('{"ppo/kl": 1}', "no JSON object with a step"),
        *((f'{{"step": {step}}}', "no JSON object") for step in ("{}", '"a"', "1.0", "true")),
        ("[" * 100_000, "no JSON object with a step"),
        ('{"step": 0}', "step 0, after those up to 0"),
        ('{"step": -1}', "step -1, after those up to 0"),
        *(
            (f'{{"step": 1, "ppo/kl": {value}}}', "metric ppo/kl is .*, expected a finite number")
            for value in ("NaN", "Infinity", '"x"', "[]", "null", "1" + "0" * 400)
        ),
    ],
)
def test_what_the_writer_never_wrote_is_named(tmp_path, line, message):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 0}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(MetricsError, match=rf"metrics.jsonl, line 2: .*{message}") as caught:
        read_metrics(tmp_path)
    assert "\n" not in str(caught.value)


def test_running_mean_by_hand():
    np.testing.assert_allclose(running_mean(np.array([1.0, 3.0, 5.0, 7.0]), 2), [1, 2, 4, 6])


def test_the_plot_shows_what_the_run_has(tmp_path):
    assert plot_run(tmp_path) == []
    writer = MetricsWriter(tmp_path, None)
    for step in range(12):
        writer.write(step, {name: step / 12 for name, _ in PANELS})
    writer.close()
    (path,) = plot_run(tmp_path)
    assert path == tmp_path / "plots" / "curves.png" and path.read_bytes().startswith(b"\x89PNG")
