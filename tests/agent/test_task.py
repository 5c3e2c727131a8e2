"""The loader: Harbor's keys, old and new, and one clear line for what is no task."""

import pytest

from t1jax.agent.task import TaskError, load_task, load_tasks

# As Terminal-Bench 2.1 writes them.
MODERN = """
schema_version = "1.1"
artifacts = []
[task]
name = "terminal-bench/write-compressor"
keywords = ["coding"]
[[task.authors]]
name = "N. C."
[metadata]
difficulty = "hard"
family = "compression"
[verifier]
timeout_sec = 900.0
[agent]
timeout_sec = 1200
user = "root"
[environment]
build_timeout_sec = 300.0
docker_image = "somebody/write-compressor:1"
cpus = 2
memory_mb = 4096
storage_mb = 20480
gpus = 0
network_mode = "allowlist"
workdir = "/srv"
env = {A = "1"}
[verifier.env]
B = "2"
[solution.env]
C = "3"
"""
DEPRECATED = """
version = "1.0"
[environment]
memory = "2G"
storage = "512M"
allow_internet = false
"""


@pytest.fixture
def folder(tmp_path):
    """folder(toml, name): writes a whole task folder and gives its path."""

    def make(toml="", name="probe"):
        path = tmp_path / "tasks" / name
        (path / "tests").mkdir(parents=True)
        (path / "tests/test.sh").write_text("true\n")
        (path / "instruction.md").write_text("Do it.\n")
        (path / "task.toml").write_text(toml)
        return path

    return make


def test_every_key_arrives(folder):
    path = folder(MODERN)
    (path / "solution").mkdir()
    (path / "solution/solve.sh").write_text("true\n")
    task = load_task(path)
    assert (task.name, task.instruction, task.family) == ("probe", "Do it.", "compression")
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.build_timeout_s) == (1200, 900, 300)
    assert (task.cpus, task.memory_mb, task.storage_mb) == (2, 4096, 20480)
    assert (task.network, task.workdir) == ("allowlist", "/srv")
    assert (task.env, task.verifier_env, task.solution_env) == ({"A": "1"}, {"B": "2"}, {"C": "3"})
    assert task.docker_image == "somebody/write-compressor:1"
    assert task.solution == path / "solution"
    assert task.unknown_keys == ("agent.user", "artifacts", "environment.gpus")


def test_deprecated_keys(folder):
    task = load_task(folder(DEPRECATED))
    assert (task.memory_mb, task.storage_mb, task.network) == (2048, 512, "no-network")
    assert task.unknown_keys == ()


def test_defaults_are_harbors(folder):
    task = load_task(folder())
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.build_timeout_s) == (600, 600, 600)
    assert (task.cpus, task.memory_mb, task.storage_mb) == (1, 2048, 10240)
    assert (task.network, task.workdir, task.solution) == ("public", None, None)
    assert task.family == "probe"


@pytest.mark.parametrize(
    "memory, mib", [("1.5G", 1536), ("512 MB", 512), ("2GiB", 2048), (300, 300)]
)
def test_sizes(folder, memory, mib):
    assert load_task(folder(f"[environment]\nmemory = {memory!r}")).memory_mb == mib


@pytest.mark.parametrize(
    "toml, named",
    [
        ("[agent]\ntimeout_sec = 'soon'", "agent.timeout_sec"),
        ("[agent]\ntimeout_sec = -1", "agent.timeout_sec"),
        ("[verifier]\ntimeout_sec = nan", "verifier.timeout_sec"),
        ("[environment]\ncpus = true", "environment.cpus"),
        ("[environment]\nmemory = 'much'", "environment.memory"),
        ("[environment]\nmemory = '1.2.3G'", "environment.memory"),
        ("[environment]\nnetwork_mode = 'some'", "environment.network_mode"),
        ("[environment]\nallow_internet = 'false'", "environment.allow_internet"),
        ("[environment]\nenv = {A = 1}", "environment.env"),
        ("verifier = 3", "verifier"),
        ("[agent", "task.toml"),
    ],
)
def test_bad_values_are_named(folder, toml, named):
    path = folder(toml)
    with pytest.raises(TaskError) as error:
        load_task(path)
    assert named in str(error.value) and str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("missing", ["task.toml", "instruction.md", "tests/test.sh"])
def test_missing_parts_are_named(folder, missing):
    path = folder()
    (path / missing).unlink()
    with pytest.raises(TaskError, match=f"{path}.*{missing} missing"):
        load_tasks(path.parent)


def test_empty_instruction(folder):
    path = folder()
    (path / "instruction.md").write_text(" \n")
    with pytest.raises(TaskError, match=r"instruction\.md is empty"):
        load_task(path)


def test_tasks_come_sorted_and_only_from_folders(folder):
    for name in ("b", "c", "a", ".git"):
        path = folder(name=name)
    (path.parent / "README.md").write_text("hello")
    (path.parent / ".git/task.toml").unlink()
    assert [task.name for task in load_tasks(path.parent)] == ["a", "b", "c"]


def test_no_tasks(tmp_path):
    with pytest.raises(TaskError, match="holds no task folders"):
        load_tasks(tmp_path)
    with pytest.raises(TaskError, match="no such folder"):
        load_tasks(tmp_path / "none")
