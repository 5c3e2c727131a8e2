import json
import re
import stat
from pathlib import Path

import pytest

LINES = """\
09:00:01 accepted from ip-1 for user-1 token=***, size 200
09:00:02 accepted from ip-2 for <user-2> (release 1.2.3.4.5)
09:00:03 refused from ip-1: user-1, token=***
09:00:04 route ip-3 -> ip-1, 300.1.1.1 is no address, nor is 10.0.0
09:00:05 note token= and user@host and @example.org stay
09:00:06 bounce to user-2. Next hop ip-4:25 token=*** token=***
09:00:07 relayed user-1,user-3 via [ip-5]
""".splitlines()
KEY = {
    "ip-1": "10.0.0.7",
    "ip-2": "192.168.4.20",
    "ip-3": "10.0.0.70",
    "ip-4": "255.255.255.255",
    "ip-5": "8.8.8.8",
    "user-1": "Maria.Lind@example.org",
    "user-2": "ops+night@mail.example.org",
    "user-3": "x_y@example.co.uk",
}


@pytest.fixture
def public():
    return Path("/app/public.log").read_text()


@pytest.mark.parametrize("number", range(len(LINES)))
def test_line(public, number):
    assert public.splitlines()[number] == LINES[number]


def test_nothing_personal_is_left(public):
    assert public.count("\n") == len(LINES)
    assert not re.search(r"10\.0\.0\.7|192\.168|lind|ops|x_y|zz==|q/1", public, re.IGNORECASE)


def test_key():
    assert json.loads(Path("/app/key.json").read_text()) == KEY


def test_key_is_private():
    assert stat.S_IMODE(Path("/app/key.json").lstat().st_mode) == 0o600
