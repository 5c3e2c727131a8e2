"""A sweep leaves folders that it goes on from, and each notebook runs on such folders, start to end."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
SWEEP = """
from configs.ablation_gap import DROPS, KEEPS, get_config


def sweep(add):
    for history, template, replay in (
        ("tokens", "", True), ("stitched", DROPS, False), ("retokenized", KEEPS, True)
    ):
        add(**{"episode.history": history, "chat_template": template, "ppo.replay": replay})
    if {broken}:
        add(**{"episode.history": "none"})
"""
pytestmark = pytest.mark.slow


def run_sweep(config: Path, out: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "launch/sweep.py", f"--config={config}:debug", f"--out={out}"]
    return subprocess.run([*command], cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """(config, folder) of three finished points; a fourth one cannot be run."""
    folder = tmp_path_factory.mktemp("sweep")
    config, out = folder / "small.py", folder / "runs"
    config.write_text(SWEEP.replace("{broken}", "True"))
    done = run_sweep(config, out)
    assert done.returncode == 1
    assert "1 of 4 points failed, the first: " in done.stderr
    assert "'none' is not" in (out / "03-history=none" / "log.txt").read_text()
    config.write_text(SWEEP.replace("{broken}", "False"))
    return config, out


def test_a_sweep_goes_on_where_it_was(swept):
    config, out = swept
    names = ["00-history=tokens-replay=True", "01-history=stitched-replay=False"]
    names.append("02-history=retokenized-replay=True")
    results = [out / name / "result.json" for name in names]
    before = [path.stat().st_mtime_ns for path in results]
    results[1].unlink()  # as if the sweep had been killed here: its run resumes, and is at its end
    steps = (out / names[1] / "metrics.jsonl").read_text()
    done = run_sweep(config, out)
    assert done.returncode == 0, done.stderr
    after = [path.stat().st_mtime_ns for path in results]
    assert after[0] == before[0] and after[2] == before[2] and after[1] > before[1]
    assert (out / names[1] / "metrics.jsonl").read_text() == steps
    assert "resuming at step 2 of 2" in (out / names[1] / "log.txt").read_text()


def test_a_folder_of_another_configuration_is_refused(swept, tmp_path):
    """Also where the point is finished: results never mix."""
    config, out = swept
    other = tmp_path / "other.py"
    other.write_text(
        config.read_text().replace(
            "def sweep",
            "base = get_config\n\n\ndef get_config(arg):\n    c = base(arg)\n    c.seed = 5\n    return c\n\n\ndef sweep",
        )
    )
    done = run_sweep(other, out)
    assert done.returncode == 1 and "seed: 0 there, 5 here" in done.stderr


def test_an_interrupt_ends_what_runs_and_the_sweep_goes_on(tmp_path):
    config, out = tmp_path / "small.py", tmp_path / "runs"
    config.write_text(SWEEP.replace("{broken}", "False"))
    command = [sys.executable, "launch/sweep.py", f"--config={config}:debug", f"--out={out}"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    log = out / "00-history=tokens-replay=True" / "log.txt"
    until = time.monotonic() + 120
    while not (log.exists() and "starting at step" in log.read_text()):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and err.endswith("interrupted; the same command goes on\n")
    assert "interrupted" in log.read_text()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            assert str(out).encode() not in (folder / "cmdline").read_bytes()


def test_a_config_without_a_sweep_is_refused(tmp_path):
    (tmp_path / "none.py").write_text("def get_config(): ...\n")
    done = run_sweep(tmp_path / "none.py", tmp_path / "runs")
    assert done.returncode == 1 and "has no sweep(add)" in done.stderr
    done = run_sweep(tmp_path / "gone.py", tmp_path / "runs")
    assert done.returncode == 1 and "gone.py does not exist" in done.stderr


def execute(name: str, folder: Path) -> list[dict]:
    """The outputs of a notebook that reads `folder`: its one line to change is the first code cell."""
    notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(notebook.cells) <= 15 and not any(cell.outputs for cell in code)
    assert code[0].source.count("\n") == 0
    code[0].source = f"FOLDER = {str(folder)!r}"
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute(cwd=str(ROOT))
    return [output for cell in code for output in cell.outputs]


def test_the_gap_notebook(swept):
    outputs = execute("ablation_gap.ipynb", swept[1])
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    rows = [line for line in text.splitlines() if line.startswith("| embedded |")]
    assert [row.split(" | ")[1:3] for row in rows] == [
        ["tokens", "replayed"],
        ["retokenized, keeps", "replayed"],
        ["stitched, drops", "free"],
    ]
    numbers = [[float(cell.split(" ± ")[0]) for cell in row.split(" | ")[3:9]] for row in rows]
    tokens, _, stitched = numbers
    assert tokens[1] < 1e-4 < stitched[1]  # the engine's part: exact tokens, other contexts
    lines = [
        json.loads(x) for x in (swept[1] / "00-history=tokens-replay=True" / "metrics.jsonl").open()
    ]
    assert tokens[0] == pytest.approx(lines[1]["gap/total"], rel=0.06)
    images = [o for o in outputs if "image/png" in getattr(o, "data", {})]
    assert len(images) == 2 and all(len(o.data["image/png"]) > 10_000 for o in images)
