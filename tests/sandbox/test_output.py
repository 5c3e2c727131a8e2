"""Bounded output: head, tail, the omitted count, code points."""

import pytest

from t1jax.sandbox.output import Output


def text(limit, *parts):
    output = Output(limit)
    for part in parts:
        output.add(part)
    return output.text()


def test_short_output_is_whole():
    assert text(10, b"01234", b"56789") == "0123456789"
    assert text(10) == ""


def test_long_output_keeps_both_ends_and_counts_the_rest():
    assert text(10, b"0123456789a") == "01234\n[... 1 bytes omitted ...]\n6789a"
    assert text(10, b"x" * 1000, b"abcde") == "xxxxx\n[... 995 bytes omitted ...]\nabcde"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_chunks_do_not_matter(size):
    data = bytes(range(256)) * 3
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    assert text(50, *parts) == text(50, data)


@pytest.mark.parametrize("shift", range(4))
@pytest.mark.parametrize("letter", ["é", "€", "😀"])
def test_cut_falls_between_code_points(letter, shift):
    data = b"a" * shift + letter.encode() * 50
    head, middle, tail = text(20, data).split("\n")
    omitted = int(middle.split()[1])
    assert "\ufffd" not in head + tail
    assert len((head + tail).encode()) + omitted == len(data)
    assert len(head.encode()) <= 10 and len(tail.encode()) <= 10


def test_invalid_bytes_and_nul_are_replaced():
    assert text(10, b"a\xff\0b") == "a\ufffd\ufffdb"
    assert "\0" not in text(4, b"\0" * 100)
