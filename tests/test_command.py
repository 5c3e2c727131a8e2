"""Bad input to the mains: one line on stderr, exit code 1, nothing half-written."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENV = os.environ | {
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
    "JAX_PLATFORMS": "cpu",
}
CONFIG = "--config=configs/tiny.py:debug"


def run(*argv: str, wrapper: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    command = [*wrapper, sys.executable, "-m", *argv]
    return subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=300)


def refused(*argv: str, says: str, wrapper: tuple[str, ...] = ()) -> None:
    done = run(*argv, wrapper=wrapper)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode != 0 and len(lines) == 1, done.stderr
    assert says in lines[0], lines[0]
    assert "Traceback" not in done.stderr


def test_a_misspelt_key(tmp_path):
    override = "--config.train.stepz=3"
    refused("t1jax.train", CONFIG, override, f"--workdir={tmp_path / 'run'}", says="stepz")
    assert not (tmp_path / "run").exists()


def test_a_missing_config_file(tmp_path):
    refused("t1jax.train", "--config=configs/none.py", f"--workdir={tmp_path}", says="none.py")


def test_a_workdir_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    refused("t1jax.train", CONFIG, f"--workdir={tmp_path / 'file'}", says="is a file")


def test_an_empty_task_folder(tmp_path):
    (tmp_path / "tasks").mkdir()
    tasks = f"--config.tasks.train={tmp_path / 'tasks'}"
    refused(
        "t1jax.train", CONFIG, tasks, f"--workdir={tmp_path / 'run'}", says="holds no task folders"
    )


def test_a_task_without_tests(tmp_path):
    done = run("t1jax.tasks", f"--out={tmp_path / 'tasks'}", "--count=2")
    assert done.returncode == 0, done.stderr
    shutil.rmtree(next((tmp_path / "tasks").iterdir()) / "tests")
    tasks = f"--config.tasks.train={tmp_path / 'tasks'}"
    refused(
        "t1jax.train", CONFIG, tasks, f"--workdir={tmp_path / 'run'}", says="tests/test.sh missing"
    )


def test_a_checkpoint_that_is_none(tmp_path):
    (tmp_path / "policy").mkdir()
    policy = f"--config.initial_policy={tmp_path / 'policy'}"
    refused(
        "t1jax.train",
        CONFIG,
        policy,
        f"--workdir={tmp_path / 'run'}",
        says="manifest.json is missing",
    )


def test_a_damaged_checkpoint(tmp_path):
    policy = tmp_path / "policy"
    shutil.copytree(ROOT / "configs/assets/tiny/sft", policy)
    largest = max((p for p in policy.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    refused(
        "t1jax.train",
        "--config=configs/tiny.py",
        f"--config.initial_policy={policy}",
        f"--workdir={tmp_path / 'run'}",
        says="differs from what was written",
    )


def test_a_workdir_in_use(tmp_path):
    holder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    refused("t1jax.train", CONFIG, f"--workdir={tmp_path}", says="in use by another run")
    os.close(holder)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk(tmp_path):
    mount = f'mount -t tmpfs -o size=64k none "{tmp_path}" && exec "$@"'
    namespaces = "-m" if os.geteuid() == 0 else "-rm"
    wrapper = ("unshare", namespaces, "sh", "-c", mount, "sh")
    refused(
        "t1jax.train",
        CONFIG,
        f"--workdir={tmp_path / 'run'}",
        wrapper=wrapper,
        says="the disk is full",
    )


def test_a_benchmark_of_no_such_name():
    refused("t1jax.bench", "modle", says="say which: python -m t1jax.bench model|sampler")
