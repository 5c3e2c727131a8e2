"""Asks the kernel: every attempt is made by a process of the user in question."""

import grp
import os
import pwd
import stat
import subprocess
from pathlib import Path

import pytest

PLANS = Path("/srv/plans")
FILES = {"north.txt": ("ada", "660"), "old/south.txt": ("ben", "660"), "old/run.sh": ("ben", "770")}


def may(user, script):
    """Whether a shell of this user, with its groups and the usual umask, carries the script out."""
    as_user = {"user": user, "group": pwd.getpwnam(user).pw_gid, "umask": 0o022, "cwd": "/"}
    groups = os.getgrouplist(user, pwd.getpwnam(user).pw_gid)
    command = ["/bin/sh", "-c", f"set -e; {script}"]
    return (
        subprocess.run(command, **as_user, extra_groups=groups, capture_output=True).returncode == 0
    )


def mode(path):
    return f"{stat.S_IMODE(path.lstat().st_mode):o}"


def test_group_and_members():
    assert sorted(grp.getgrnam("planners").gr_mem) == ["ada", "ben"]
    assert all(grp.getgrgid(pwd.getpwnam(u).pw_gid).gr_name == u for u in ("ada", "ben", "cleo"))


@pytest.mark.parametrize("name", FILES)
def test_file_that_was_there(name):
    path, (owner, bits) = PLANS / name, FILES[name]
    assert (path.owner(), path.group(), mode(path)) == (owner, "planners", bits)


@pytest.mark.parametrize("user", ["ada", "ben"])
def test_members_make_files_of_the_group(user):
    for folder in (PLANS, PLANS / "old"):
        assert may(user, f"echo x >{folder}/{user}.new")
        assert (folder / f"{user}.new").group() == "planners"


def test_members_change_what_others_made():
    assert may("ben", f"echo more >>{PLANS}/north.txt") and may("ada", f"{PLANS}/old/run.sh")


def test_members_do_not_remove_what_others_made():
    assert may("ben", f"cat {PLANS}/north.txt")
    assert not may("ben", f"rm -f {PLANS}/north.txt")
    assert not may("ada", f"mv {PLANS}/old/south.txt {PLANS}/old/west.txt")


def test_others_see_nothing():
    assert not may("cleo", f"ls {PLANS}") and not may("cleo", f"cat {PLANS}/old/south.txt")


def test_copy_is_kept():
    original = Path("/srv/plans.orig")
    found = {p.name: (p.owner(), p.group(), mode(p)) for p in original.rglob("*") if p.is_file()}
    was = {"north.txt": ("ada", "ada", "600"), "south.txt": ("ben", "ben", "644")}
    assert found == was | {"run.sh": ("ben", "ben", "755")} and mode(original) == "777"
