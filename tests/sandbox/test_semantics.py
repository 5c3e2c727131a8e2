"""The shell, programs, time-outs and files: what every kind of sandbox does, on each of them."""

import asyncio
import time

import pytest
from sandbox_fixtures import commands, outputs

from t1jax.sandbox.protocol import SandboxError

ENV = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}


@pytest.fixture(params=["namespace", pytest.param("docker", marks=pytest.mark.docker)])
def inside(request):
    return request.getfixturevalue(f"inside_{request.param}")


def test_shell_keeps_folder_variables_and_last_status(inside):
    assert outputs(
        inside,
        "cd /tmp; x=3; declare -A m=([a]=b)",
        'echo "$x ${m[a]} $PWD"; false',
        "echo $?",
        'f() { echo it\\\'s "$1"; }',
        "f 'a\\nb'\nf \"two\nlines\"",
        "break; return",
    )[1:5] == [(1, "3 b /tmp\n"), (0, "1\n"), (0, ""), (0, "it's a\\nb\nit's two\nlines\n")]


def test_a_command_may_have_another_bound_of_output(inside):
    async def body(sandbox):
        return [
            (await sandbox.run("seq 40000", 10.0, bound)).output for bound in (1 << 20, 8, None)
        ]

    whole, short, usual = inside(body)
    assert whole == "".join(f"{i}\n" for i in range(1, 40001))
    assert short.startswith("1\n2\n\n[... ") and short.endswith("000\n") and len(short) < 60
    assert "bytes omitted" in usual and 9_000 < len(usual) < 11_000


def test_exit_codes_are_true(inside):
    assert [
        code
        for code, _ in outputs(
            inside, "false | tee x", "true", "(exit 7)", "nothere", "if", "/etc", "kill -9 $BASHPID"
        )
    ] == [1, 0, 7, 127, 2, 126, 137]


def test_standard_input_is_empty_and_protocol_survives_readers(inside):
    got = outputs(inside, "cat; read a; echo $?", "exec </etc/hostname; read a; echo $a", "cat")
    assert got == [(0, "1\n"), (0, "sandbox\n"), (0, "")]


def test_shell_starts_again_after_exit_and_says_so(inside):
    exited, after = outputs(inside, "x=1; echo bye; exit 3", 'echo "[$x]" $PWD')
    assert exited == (3, "bye\n[the shell was started again]\n")
    assert after == (0, "[] /app\n")


def test_output_cannot_pretend_to_be_the_protocol(inside):
    forged = outputs(inside, 'for i in 1 2 3 4; do echo "$i 0"; done; false', "echo still here")
    assert forged == [(1, "1 0\n2 0\n3 0\n4 0\n"), (0, "still here\n")]


def test_background_process_does_not_hold_the_command(inside):
    started = time.monotonic()
    first, second = outputs(inside, "sleep 1000 & yes >/dev/null & echo on", "jobs -p | wc -l")
    assert first == (0, "on\n") and second == (0, "2\n") and time.monotonic() - started < 5


def test_time_out_kills_all_the_command_started_and_nothing_else(inside):
    lines = (
        "cd /tmp; sleep 501 & echo before",
        "(setsid sleep 502 &); sh -c 'sleep 503 & sleep 504'; echo never",
        "pwd; ps -eo args | grep -c '[s]leep 50[234]'; ps -eo args | grep '[s]leep 501'",
    )
    before, late, after = commands(inside, *lines, timeout_s=1.0)
    assert late.timed_out and late.exit_code == 124 and 1 <= late.seconds < 4
    assert late.output == (
        "[timed out after 1 s, its processes were killed; the shell was started again]\n"
    )
    assert not before.timed_out and after.output == "/tmp\n0\nsleep 501\n"


def test_huge_output_is_bounded_and_does_not_block(inside):
    big, after = commands(
        inside, "yes héllo | head -c 300000000; printf '\\0\\xff end'", "echo next", timeout_s=60
    )
    assert len(big.output.encode()) < 10_100 and big.output.startswith("héllo\n")
    assert big.output.endswith("\ufffd\ufffd end") and "bytes omitted" in big.output
    assert after.output == "next\n"


def test_endless_writer_ends_with_its_time_out(inside):
    late, after = commands(inside, "yes", "echo next", timeout_s=0.5)
    assert late.timed_out and late.seconds < 4 and after.output.endswith("next\n")


def test_environment_is_the_same_everywhere(inside):
    lines = (
        "env | sort",
        "umask; hostname; id -u; ulimit -c",
    )
    one, two = outputs(inside, *lines), outputs(inside, *lines)
    assert one == two
    assert "HOME=/root\nLANG=C.UTF-8\nLC_ALL=C.UTF-8\n" in one[0][1] and "TZ=UTC\n" in one[0][1]
    assert one[1][1] == "0022\nsandbox\n0\n0\n"


def test_execute_has_exactly_its_environment_and_no_descriptor_of_ours(inside):
    async def body(sandbox):
        await sandbox.run("rm -rf /app; sleep 1000 &", 20)
        env = await sandbox.execute(["env"], 20, {"A": "1", "PATH": "/usr/bin:/bin"}, "/tmp")
        fds = await sandbox.execute(["ls", "/proc/self/fd"], 20, ENV, None)
        gone = await sandbox.execute(["pwd"], 20, ENV, None)
        missing = await sandbox.execute(["nothere"], 20, ENV, None)
        late = await sandbox.execute(["sh", "-c", "echo x; sleep 1000"], 0.5, ENV, "/")
        return env, fds, gone, missing, late

    env, fds, gone, missing, late = inside(body)
    assert env.output == "A=1\nPATH=/usr/bin:/bin\n"
    assert fds.output.split() == ["0", "1", "2", "3"]  # 3: the folder that ls reads
    assert gone.output == "/\n"
    assert missing.exit_code == 127 and "nothere" in missing.output
    assert late.timed_out and late.output.startswith("x\n[timed out after 0.5 s")


def test_end_agent_ends_background_writers_for_good(inside):
    async def body(sandbox):
        await sandbox.run("(setsid bash -c 'while :; do echo x >> /tmp/w; done' &) ; sleep 0.1", 20)
        await sandbox.end_agent()
        left = await sandbox.execute(
            ["bash", "-c", "echo /proc/[0-9]*; stat -c %s /tmp/w"], 20, ENV, "/"
        )
        await asyncio.sleep(0.1)
        again = await sandbox.execute(
            ["bash", "-c", "echo /proc/[0-9]*; stat -c %s /tmp/w"], 20, ENV, "/"
        )
        with pytest.raises(SandboxError, match="ended"):
            await sandbox.run("true", 20)
        return left.output, again.output

    left, again = (text.replace("/proc/1 ", "").split() for text in inside(body))
    assert len(left) == 2 and left[1] == again[1]


def test_cancelled_call_is_ended_inside_and_leaves_the_sandbox_usable(inside):
    async def body(sandbox):
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sandbox.run("echo x; sleep 1000", 60), 0.3)
        after = await sandbox.run("pgrep sleep; echo ok", 20)
        return after.output, time.monotonic() - started

    output, seconds = inside(body)
    assert output == "ok\n" and seconds < 5


def test_put_and_get_keep_bytes_and_modes(inside, tmp_path):
    source = tmp_path / "tests"
    (source / "deep").mkdir(parents=True)
    (source / "test.sh").write_bytes(b"#!/bin/bash\necho \xff\n")
    (source / "test.sh").chmod(0o755)
    (source / "deep" / "empty").touch()
    (source / "link").symlink_to("/etc/shadow")

    async def body(sandbox):
        await sandbox.put("/tests", source)
        await sandbox.put("/a/b/c", source / "test.sh")
        listing = await sandbox.run("cd /tests; stat -c '%a %n' *; readlink link", 20)
        return listing.output, await sandbox.get("/a/b/c", 100), await sandbox.get("/a/b/c", 10)

    listing, data, too_large = inside(body)
    assert listing == "755 deep\n777 link\n755 test.sh\n/etc/shadow\n"
    assert data == b"#!/bin/bash\necho \xff\n" and too_large is None


def test_get_follows_no_link_and_waits_for_no_fifo(inside):
    names = ("link", "folder/passwd", "fifo", "sparse", "dir", "device", "none")

    async def body(sandbox):
        await sandbox.run(
            "mkdir -p /logs; cd /logs; ln -s /etc/passwd link; ln -s /etc folder; mkfifo fifo; mkdir dir;"
            " truncate -s 40M sparse; ln -s /dev/zero device; echo ok > plain",
            20,
        )
        got = [await sandbox.get(f"/logs/{name}", 1 << 20) for name in names]
        return got, await sandbox.get("/logs/plain", 1 << 20)

    assert inside(body) == ([None] * len(names), b"ok\n")


def test_put_and_reset_replace_what_was_planted(inside, tmp_path):
    (tmp_path / "file").write_text("ours")

    async def body(sandbox):
        await sandbox.run(
            "mkdir -p /logs /tests; echo mine > /srv/mine; ln -s /srv /logs/verifier; mkfifo /tests/pipe;"
            " ln -s /srv/mine /tests/file; mkdir /logs/deep; cd /logs/deep;"
            " for i in {1..30}; do mkdir d; cd d; done; touch x; chmod 0 /logs/deep",
            60,
        )
        await sandbox.reset_folder("/logs/verifier")
        await sandbox.put("/tests/file", tmp_path / "file")
        await sandbox.put("/tests/pipe", tmp_path / "file")
        await sandbox.reset_folder("/logs")
        await sandbox.reset_folder("/logs/verifier")
        listing = await sandbox.execute(["ls", "-A", "/logs", "/srv"], 20, ENV, "/")
        mine = await sandbox.get("/srv/mine", 100)
        return (
            listing.output,
            mine,
            await sandbox.get("/tests/file", 9),
            await sandbox.get("/tests/pipe", 9),
        )

    listing, mine, file, pipe = inside(body)
    assert listing == "/logs:\nverifier\n\n/srv:\nmine\n"
    assert (mine, file, pipe) == (b"mine\n", b"ours", b"ours")


def test_paths_must_be_absolute(inside, tmp_path):
    async def body(sandbox):
        for path in ("tests", "/tests/../etc"):
            with pytest.raises(ValueError, match="absolute"):
                await sandbox.put(path, tmp_path)

    inside(body)


def test_dockerfile_is_carried_out(inside, tmp_path):
    (tmp_path / "environment" / "data").mkdir(parents=True)
    (tmp_path / "environment" / "data" / "a.txt").write_text("a")
    text = "FROM x\nENV WHO=me\nWORKDIR /work\nCOPY data/ data/\nRUN echo $WHO > who && cp data/a.txt b\n"

    async def body(sandbox):
        return (await sandbox.run("pwd; cat who b; echo $WHO $EXTRA", 20)).output

    assert inside(body, text, env={"EXTRA": "1"}) == "/work\nme\name 1\n"
    assert inside(body, text, workdir="/").startswith("/\n")
    with pytest.raises(SandboxError, match=r"exit 4.* 4"):
        inside(body, "FROM x\nRUN exit 4\n")
