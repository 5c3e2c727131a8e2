"""A real tmux in a real sandbox: what is typed arrives, and what is read is new."""

import asyncio
import dataclasses

import pytest
from fakes import generated, need_sandbox

from t1jax.agent.action import Line
from t1jax.agent.terminal import HEIGHT, HISTORY, KEYS, Terminal, TerminalClosed, since, typing
from t1jax.sandbox.namespace import NamespaceSandbox
from t1jax.sandbox.protocol import SandboxError

NEW, SCREEN = "New Terminal Output:\n", "Current Terminal Screen:\n"
LIMIT = 10_000
PROMPT = "bash-5.2#"


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    need_sandbox()
    return generated(tmp_path_factory.mktemp("tasks"), 1)[0][0]


@pytest.fixture
def type_in(task):
    """type_in(*turns) -> what each turn read; a turn is keystrokes, or a list of them, each with a wait."""

    def go(*turns, task=task, limit=LIMIT, max_wait=60.0):
        async def main():
            sandbox = await NamespaceSandbox.start(task, limit)
            try:
                terminal = await Terminal.open(sandbox, max_wait, limit)
                read = [await terminal.screen()]
                for turn in turns:
                    lines = [(turn, 0.3)] if isinstance(turn, str) else turn
                    result = await terminal.run(tuple(Line(*line) for line in lines))
                    assert (result.exit_code, result.timed_out) == (0, False)
                    read.append(result.output)
                return read
            finally:
                await sandbox.close()

        return asyncio.run(main())

    return go


def prompt_of(read) -> str:
    assert read.startswith(SCREEN)
    return read.removeprefix(SCREEN)


def test_text_is_run_by_its_newline_alone(type_in):
    first, typed, waited, ran = type_in("echo ma", "", "ple\n")
    prompt = prompt_of(first)
    assert typed == waited == f"{NEW}{prompt} echo ma"
    assert ran == f"{NEW}{prompt} echo maple\nmaple\n{prompt}"


def test_commands_of_a_turn_are_typed_in_order_and_waited_for(type_in):
    first, read = type_in([("sleep 0.3; echo $((6*7))\n", 0.6), ("pwd", 0.0), ("\n", 0.3)])
    prompt = prompt_of(first)
    assert read == f"{NEW}{prompt} sleep 0.3; echo $((6*7))\n42\n{prompt} pwd\n/app\n{prompt}"


def test_the_wait_is_capped(type_in):
    *_, read = type_in([("sleep 30\n", 60.0)], max_wait=0.3)
    assert read.endswith("sleep 30")


def test_control_c_ends_what_runs(type_in):
    first, running, ended = type_in("sleep 100\n", "C-c")
    prompt = prompt_of(first)
    assert running == f"{NEW}{prompt} sleep 100"
    assert ended == f"{NEW}{prompt} sleep 100\n^C\n{prompt}"


def test_keys_by_name_by_code_and_in_programs(type_in):
    """Control-D ends an interpreter; Up brings a line back; Escape as a byte leaves vim's insertion."""
    *_, up, python, left, _, text = type_in(
        "echo pine\n",
        [("Up", 0.1), ("Enter", 0.2)],
        [("cat > a\n", 0.2), ("oak\n", 0.1)],
        "C-d",
        [("vim -u NONE a\n", 0.8), ("xA!\x1b:wq\n", 0.3)],
        "cat a\n",
    )
    assert up.count("pine") == 2
    assert python.endswith("cat > a\noak")
    assert left.splitlines()[-1].startswith("bash")
    assert "ak!" in text.splitlines()


def test_a_pager_left_open_is_a_screen_and_gone_afterwards(type_in):
    first, opened, paged, left, after = type_in(
        [("seq 100 | less\n", 0.4)], "Space", "q", "echo a\n"
    )
    prompt = prompt_of(first)
    assert opened.startswith(f"{SCREEN}1\n2\n") and opened.endswith("39\n:")
    assert paged.startswith(f"{SCREEN}40\n")
    assert left == f"{SCREEN}{prompt} seq 100 | less\n{prompt}"
    assert after == f"{NEW}{prompt} echo a\na\n{prompt}"


def test_an_editor_left_open_is_a_screen(type_in):
    _, opened, typed = type_in([("vim -u NONE\n", 0.8)], "ihello")
    assert opened.startswith(SCREEN) and opened.count("~") >= HEIGHT - 3
    assert typed.startswith(f"{SCREEN}hello\n~")


def test_a_cleared_screen_is_shown_as_it_is(type_in):
    first, _, cleared, after = type_in("seq 50\n", "clear\n", "echo a\n")
    prompt = prompt_of(first)
    assert cleared == f"{SCREEN}{prompt}"
    assert after == f"{NEW}{prompt} echo a\na\n{prompt}"


def test_output_beyond_the_screen_is_read_once(type_in):
    first, one, two, three = type_in("seq 100\n", "seq 200 300\n", "true\n")
    prompt = prompt_of(first)
    for read, name, numbers in ((one, "seq 100", (1, 101)), (two, "seq 200 300", (200, 301))):
        wanted = "\n".join(map(str, range(*numbers)))
        assert read == f"{NEW}{prompt} {name}\n{wanted}\n{prompt}"
    assert three == f"{NEW}{prompt} true\n{prompt}"


def test_long_output_is_cut_in_the_middle(type_in):
    first, read = type_in([("seq 10000\n", 0.5)])
    text = f"{prompt_of(first)} seq 10000\n" + "".join(f"{i}\n" for i in range(1, 10001)) + PROMPT
    half = LIMIT // 2
    omitted = len(text) - LIMIT
    assert read == f"{NEW}{text[:half]}\n[... {omitted} bytes omitted ...]\n{text[-half:]}"


def test_cuts_fall_between_characters(type_in):
    """By hand: an end of 5 bytes holds one of the characters of 3, an end of 6 bytes both."""
    for limit, kept in ((10, 1), (12, 2)):
        *_, read = type_in([("PS1=; clear\n", 0.3)], "printf 木木木木木木木木木\n", limit=limit)
        assert "\ufffd" not in read
        assert read.endswith("木" * kept) and "bytes omitted" in read


def test_more_than_tmux_keeps_is_a_screen(type_in):
    first, read, after = type_in([(f"seq {HISTORY + 5000}\n", 1.0)], "echo a\n")
    assert read.startswith(f"{SCREEN}{HISTORY + 5000 - HEIGHT + 2}\n")
    assert after == f"{NEW}{prompt_of(first)} echo a\na\n{prompt_of(first)}"


def test_what_never_stops_is_bounded(type_in):
    _, read, ended = type_in([("yes $(seq 60)\n", 1.5)], [("C-c", 0.5), ("clear\n", 0.3)])
    assert read.startswith(SCREEN) and len(read) < 2 * LIMIT
    assert ended == f"{SCREEN}{PROMPT}"


def test_letters_of_all_kinds_and_escape_sequences(type_in):
    first, read, colours = type_in(
        "echo 'naïve 日本 🙂 $x \\ \" ` ;'\n", "printf '\\033[31mred\\033[0m\\a\\tx\\n'\n"
    )
    prompt = prompt_of(first)
    assert read.splitlines()[2] == 'naïve 日本 🙂 $x \\ " ` ;'
    assert read.endswith(f"\n{prompt}")
    assert colours.splitlines()[2] == "red     x"


@pytest.mark.parametrize(
    "text", ["-l", "--", "ls;", "a \\;", ";", "Enterr", "日本", "'\"$(x)", "#{pid}"]
)
def test_text_that_tmux_could_misread_is_typed(type_in, text):
    first, read = type_in(text)
    assert read == f"{NEW}{prompt_of(first)} {text}"


def test_long_text_arrives_whole(type_in):
    body = "x'y日;" * 10 + "\n"
    count = 4 * KEYS // len(body)
    _, _, size = type_in(
        [(f"cat > big <<'EOF'\n{body * count}EOF\n", 1.5)], "wc -c < big; sort -u big\n"
    )
    assert size.splitlines()[2:4] == [str(len((body * count).encode())), body.rstrip()]


def test_how_text_is_typed():
    assert typing("") == []
    assert typing("C-c") == ["send-keys -t main -- C-c"]
    assert typing("ls\n") == ["send-keys -t main -- 'ls\n'"]
    assert typing("a;") == ["send-keys -t main -- 'a\\;'"]
    pieces = typing("é;" * KEYS)
    assert all(p.startswith("send-keys -l -t main -- ") for p in pieces)
    assert all(len(p.encode()) < KEYS + 50 for p in pieces)


def test_what_is_new():
    assert since("$", ["$ ls", "a", "$", "", ""]) == "$ ls\na\n$"
    assert since("a\n$", ["a", "$ ls", "b", "$"]) == "$ ls\nb\n$"
    assert since("a\n$", ["a", "$", ""]) == "$"
    assert since("a\n$", ["b", "$"]) is None
    assert since("a\n 50%", ["a", "100%"]) is None
    assert since("", ["", "a"]) == "\na"


def test_an_image_without_tmux_is_refused(task, type_in, tmp_path):
    (tmp_path / "Dockerfile").write_text(
        "FROM scratch\nRUN mkdir /only && ln -s /usr/bin/bash /only/bash\nENV PATH=/only\n"
    )
    bare = dataclasses.replace(task, environment=tmp_path)
    with pytest.raises(SandboxError, match=r"^there is no tmux in the task's image: install it in"):
        type_in(task=bare)


@pytest.mark.parametrize("way", ["exit\n", "C-d", "tmux kill-server\n", "kill -9 $PPID\n"])
def test_an_agent_can_end_its_terminal(type_in, way):
    with pytest.raises(TerminalClosed):
        type_in([(way, 0.5)], "echo a\n")


@pytest.mark.parametrize(
    "trick",
    [
        "rm -f /tmp/.terminus/capture; mkdir /tmp/.terminus/capture\n",
        "ln -sf /etc/passwd /tmp/.terminus/capture\n",
        "head -c 1G /dev/zero > /fill\n",
    ],
)
def test_an_agent_that_disturbs_the_reading_sees_the_screen(type_in, trick):
    first, read, after = type_in([(trick, 0.6)], "echo maple\n")
    assert read.startswith((SCREEN, NEW))
    assert after.endswith(f"maple\n{prompt_of(first)}")
