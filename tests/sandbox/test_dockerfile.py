"""The part of a Dockerfile that the namespace sandbox reads, and what it refuses."""

import pytest

from t1jax.sandbox.dockerfile import Copy, Folder, Run, parse, read
from t1jax.sandbox.spawner import SandboxUnavailable


def test_plan_of_every_instruction(tmp_path):
    for name in ("a.txt", "b.txt", "run.sh"):
        (tmp_path / name).touch()
    (tmp_path / "data").mkdir()
    plan = parse(
        "# syntax=docker/dockerfile:1\n"
        "from ubuntu:24.04 AS base\n"
        'ENV A=1 B="two words" \\\n'
        "    # a comment between\n"
        "    C=${A}x\n"  # A as it was before this instruction
        "ENV OLD the old form\n"
        "WORKDIR /srv/$A\n"
        "WORKDIR below\n"
        "COPY *.txt .\n"
        "COPY run.sh /usr2/run\n"
        'COPY ["data", "/data/"]\n'
        "COPY a.txt new/\n"
        "RUN echo $A && \\\n"
        "    echo done\n"
        'RUN ["touch", "x y"]\n',
        tmp_path,
    )
    env = {"A": "1", "B": "two words", "C": "x", "OLD": "the old form"}
    below = "/srv/1/below"
    assert plan.env == env and plan.workdir == below
    assert plan.steps == (
        Folder("/srv/1"),
        Folder(below),
        Copy(tmp_path / "a.txt", f"{below}/a.txt"),
        Copy(tmp_path / "b.txt", f"{below}/b.txt"),
        Copy(tmp_path / "run.sh", "/usr2/run"),
        Copy(tmp_path / "data", "/data"),
        Copy(tmp_path / "a.txt", f"{below}/new/a.txt"),
        Run(("/bin/sh", "-c", "echo $A &&      echo done"), env, below),
        Run(("touch", "x y"), env, below),
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("$X", "1"),
        ("${X}y", "1y"),
        ("${N:-d}", "d"),
        ("${X:-d}", "1"),
        ("${X:+s}", "s"),
        ("${N:+s}", ""),
        ("$N", ""),
        (r"\$X", "$X"),
        ('"a $X"', "a 1"),
    ],
)
def test_variables(tmp_path, value, expected):
    assert parse(f"FROM x\nENV X=1\nENV V={value}\n", tmp_path).env["V"] == expected


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("CMD bash", "CMD"),
        ("USER me", "USER"),
        ("ADD a b", "ADD"),
        ("ARG X=1", "ARG"),
        ("HEALTHCHECK NONE", "HEALTHCHECK"),
        ("FROM y", "a second FROM"),
        ("RUN --mount=type=cache,target=/x true", "RUN --mount"),
        ("RUN cat <<EOF", "here-document"),
        ("COPY --from=base /a /b", "COPY --from=base"),
        ("COPY ../secret /b", "from outside"),
        ("COPY nothere /b", "nothere"),
        ("COPY Dockerfile /usr/bin/x", "read-only"),
        ("COPY Dockerfile", "COPY Dockerfile"),
        ('ENV A="open', "quotation"),
        ("nonsense", "nonsense"),
    ],
)
def test_refuses_by_name_and_line(tmp_path, line, names):
    (tmp_path / "Dockerfile").touch()
    with pytest.raises(SandboxUnavailable, match=r"Dockerfile line 2: .*" + names):
        parse(f"FROM x\n{line}\n", tmp_path)


def test_missing_pieces_are_named(tmp_path):
    with pytest.raises(SandboxUnavailable, match="Dockerfile is missing"):
        read(tmp_path)
    with pytest.raises(SandboxUnavailable, match="no FROM"):
        parse("# nothing\n", tmp_path)
    (tmp_path / "docker-compose.yaml").touch()
    with pytest.raises(SandboxUnavailable, match="docker-compose"):
        read(tmp_path)


def test_reading_again_sees_a_changed_file(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM x\nWORKDIR /a\n")
    assert read(tmp_path).workdir == "/a"
    (tmp_path / "Dockerfile").write_text("FROM x\nWORKDIR /abc\n")
    assert read(tmp_path).workdir == "/abc"
