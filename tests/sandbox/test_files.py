"""The supervisor's file operations, on folders as an agent may leave them."""

import os
import tempfile
from pathlib import Path

from t1jax.sandbox import files


def deep(path, levels: int) -> None:
    """A chain of folders far longer than a path may be, with a file and a sibling on every level."""
    path.mkdir()
    fd = os.open(path, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=fd)
        os.mkdir(".0", dir_fd=fd)
        os.close(os.open("f", os.O_CREAT, dir_fd=fd))
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)


def test_reset_empties_a_tree_of_any_depth():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # a tmpfs, as in the sandbox
        path = Path(folder, "x")
        deep(path, 3000)
        before = len(os.listdir("/proc/self/fd"))
        files.reset(str(path))
        assert os.listdir(path) == [] and len(os.listdir("/proc/self/fd")) == before


def test_reset_replaces_links_and_files_without_touching_their_targets(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "kept").touch()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "link").symlink_to(tmp_path / "target")
    (tmp_path / "file").touch()
    for name in ("link", "inner", "file", "new/deep"):
        files.reset(str(tmp_path / name))
        assert (tmp_path / name).is_dir() and not (tmp_path / name).is_symlink()
        assert list((tmp_path / name).iterdir()) == []
    assert (tmp_path / "target" / "kept").exists()


def test_write_never_passes_through_a_link(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "folder").symlink_to(tmp_path / "target")
    (tmp_path / "file").symlink_to(tmp_path / "target" / "file")
    os.mkfifo(tmp_path / "pipe")
    entries = [["", "folder", 0o755, 0], ["a", "file", 0o640, 2], ["l", "link", 0o777, 4]]
    files.write(str(tmp_path / "folder"), entries, b"hi/etc")
    for name in ("file", "pipe"):
        files.write(str(tmp_path / name), [["", "file", 0o600, 2]], b"ok")
        assert (tmp_path / name).read_bytes() == b"ok" and not (tmp_path / name).is_symlink()
    assert list((tmp_path / "target").iterdir()) == []
    assert (tmp_path / "folder" / "a").read_bytes() == b"hi"
    assert (tmp_path / "folder" / "a").stat().st_mode & 0o777 == 0o640
    assert os.readlink(tmp_path / "folder" / "l") == "/etc"


def test_read_wants_a_regular_file_of_the_right_size(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    assert files.read(str(tmp_path / "file"), 5) == b"12345"
    assert files.read(str(tmp_path / "file"), 4) is None
    for name in ("link", "pipe", "none", "", "file/below"):
        assert files.read(f"{tmp_path}/{name}", 5) is None
