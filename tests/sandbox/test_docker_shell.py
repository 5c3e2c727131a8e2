"""Answers within a stream, and files within a tar stream, wherever they are cut."""

import io
import os
import tarfile

import pytest

from t1jax.sandbox import tar
from t1jax.sandbox.docker_shell import Answers
from t1jax.sandbox.output import Output
from t1jax.sandbox.protocol import SandboxError


def feed(answers, data, size):
    """The first answer, and the output before it."""
    output = Output(1000)
    for start in range(0, len(data), size):
        if found := answers.feed(data[start : start + size], output):
            return found, output.text(), data[start + size :]
    return None, output.text(), b""


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_an_answer_is_found_wherever_the_stream_is_cut(size):
    answers = Answers()
    answers.expect(b"first")
    found, text, rest = feed(
        answers, b"no first done x\nfirst\nabc" + b"first done 7\nlater ", size
    )
    assert (found, text) == (("done", 7), "no first done x\nfirst\nabc")
    answers.expect(b"second")
    found, text, _ = feed(answers, rest + b"first gone 137\non\nsecond gone 0\n", size)
    assert (found, text) == (("gone", 0), "later on\n")


def test_nothing_is_an_answer_to_another_request():
    answers = Answers()
    answers.expect(b"mine")
    assert feed(answers, b"other done 0\n" * 3, 5)[0] is None


def test_what_was_packed_can_be_read(tmp_path):
    source = tmp_path / "tree"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "run.sh").write_bytes(b"x" * 5000)
    (source / "deep" / "run.sh").chmod(0o755)
    (source / "link").symlink_to("/etc/shadow")
    with tar.pack("/tests", source, ["a"]) as stream, tarfile.open(fileobj=stream) as found:
        entries = {e.name: (e.type, e.mode, e.size, e.linkname) for e in found.getmembers()}
        assert all(e.uid == e.gid == 0 for e in found.getmembers())
    assert entries["tests/deep/run.sh"] == (tarfile.REGTYPE, 0o755, 5000, "")
    assert entries["tests/link"][3] == "/etc/shadow" and list(entries)[:2] == ["a", "tests"]


def test_pack_refuses_what_is_no_file_and_what_is_too_much(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SandboxError, match="pipe is neither"):
        tar.pack("/x", tmp_path / "pipe", [])
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(tar.MAX_PUT + 1)
    with pytest.raises(SandboxError, match="more than"):
        tar.pack("/x", tmp_path / "sparse", [])


@pytest.mark.parametrize(
    ("kind", "size", "wanted"),
    [
        (tarfile.REGTYPE, 5, b"12345"),
        (tarfile.REGTYPE, 6, None),
        (tarfile.SYMTYPE, 0, None),
        (tarfile.DIRTYPE, 0, None),
        (tarfile.FIFOTYPE, 0, None),
        (tarfile.CHRTYPE, 0, None),
        (tarfile.LNKTYPE, 0, None),
    ],
)
def test_only_a_regular_file_of_the_right_size_is_read(kind, size, wanted):
    data, entry = io.BytesIO(), tarfile.TarInfo("x")
    entry.type, entry.size, entry.linkname = kind, size, "/etc/shadow"
    with tarfile.open(fileobj=data, mode="w") as archive:
        archive.addfile(entry, io.BytesIO(b"123456"))
    data.seek(0)
    assert tar.read_file(data, 5) == wanted
