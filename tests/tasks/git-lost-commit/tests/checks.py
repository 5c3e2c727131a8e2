"""Reads objects and refs alone: no filter, hook or monitor of the repository runs for that."""

import subprocess
from pathlib import Path

REPOSITORY = Path("/app/notes")


def git(*arguments):
    command = ["/usr/bin/git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout


def test_lost_commit_is_in_the_history():
    assert "Finish the chapter on tides\n" in git("log", "--format=%s", "main")


def test_its_author_is_kept():
    log = git("log", "--format=%an <%ae> %at|%s", "main")
    assert "Ines Waal <ines@example.org> 1709618828|Finish the chapter on tides\n" in log


def test_main_was_not_rewritten():
    log = git("log", "--format=%cn|%s", "--first-parent", "main").splitlines()
    assert log[-2:] == ["Keeper|Point to the almanac", "Keeper|Begin"]


def test_conflict_is_resolved_as_asked():
    text = "Tides\nSee the almanac.\nThe moon pulls twice a day.\n"
    assert git("cat-file", "blob", "main:tides.txt") == text


def test_other_files_are_there():
    assert git("cat-file", "blob", "main:words.txt") == "spring\nneap\n"
    assert git("cat-file", "blob", "main:winds.txt") == "Winds\nTrade winds blow west.\n"


def test_nothing_is_left_over():
    names = git("ls-tree", "-r", "--name-only", "main").split()
    assert names == ["tides.txt", "winds.txt", "words.txt"]
    assert sorted(p.name for p in REPOSITORY.iterdir()) == [".git", *names]
    for name in names:
        assert (REPOSITORY / name).read_text() == git("cat-file", "blob", f"main:{name}")
    assert git("for-each-ref", "--format=%(refname)") == "refs/heads/main\n"
