"""Reads the part of environment/Dockerfile that needs no image: what the namespace sandbox can carry out.

FROM (its image is replaced by the host's /usr), WORKDIR, ENV, COPY from the folder, RUN. Comments, line
continuations and $VARIABLES as Docker has them. Any other instruction is refused by its name.
"""

import dataclasses
import functools
import glob
import json
import os
import posixpath
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from t1jax.sandbox.spawner import SandboxUnavailable

INSTRUCTION = re.compile(r"([A-Za-z]+)\s+(.*)", re.DOTALL)
ESCAPE = re.compile(r"#\s*escape\s*=\s*`", re.IGNORECASE)
VARIABLE = re.compile(r"\\(.)|\$(?:\{(\w+)(?::([-+])([^}]*))?\}|(\w+))")
BASE_FOLDERS = frozenset({"/", "/app", "/home", "/opt", "/root", "/srv", "/tmp", "/var"})
READ_ONLY = ("/usr/", "/bin/", "/sbin/", "/lib/", "/lib64/", "/proc/", "/dev/")


@dataclasses.dataclass(frozen=True)
class Copy:
    """A host file or folder goes to an absolute path; a folder's contents, not the folder itself."""

    source: Path
    target: str


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder is made, with its parents."""

    target: str


@dataclasses.dataclass(frozen=True)
class Run:
    """A program runs in `workdir` with the variables set so far."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    workdir: str | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a Dockerfile asks for, in order; `workdir` None where it names none."""

    steps: tuple[Copy | Folder | Run, ...]
    env: Mapping[str, str]
    workdir: str | None


def read(environment: Path) -> Plan:
    """The plan of a task's environment folder. Raises SandboxUnavailable naming what is not supported."""
    for name in ("docker-compose.yaml", "docker-compose.yml", ".dockerignore"):
        if (environment / name).exists():
            raise SandboxUnavailable(f"{environment / name}: needs the docker sandbox")
    path = environment / "Dockerfile"
    try:
        status = path.stat()
    except OSError:
        raise SandboxUnavailable(f"{path} is missing: the namespace sandbox needs one") from None
    return _cached(environment, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=4096)
def _cached(environment: Path, mtime_ns: int, size: int) -> Plan:
    return parse((environment / "Dockerfile").read_text(), environment)


def parse(text: str, environment: Path) -> Plan:
    """The plan of a Dockerfile's text; sources of COPY lie in the folder `environment`."""
    steps, env, workdir, stages = [], {}, None, 0
    folders = set(BASE_FOLDERS)
    for number, name, rest in _instructions(text):
        refuse = functools.partial(_refuse, number)
        if name == "FROM":
            stages += 1
            if stages > 1:
                refuse("a second FROM")
        elif stages == 0:
            refuse(f"{name} before FROM")
        elif name == "WORKDIR":
            workdir = _join(workdir, _expand(rest.strip(), env))
            folders.add(workdir)
            steps.append(Folder(workdir))
        elif name == "ENV":
            env = {**env, **_variables(rest, env, refuse)}
        elif name == "COPY":
            copies = _copies(rest, env, workdir, folders, environment, refuse)
            folders.update(posixpath.dirname(copy.target) for copy in copies)
            folders.update(copy.target for copy in copies if copy.source.is_dir())
            steps += copies
        elif name == "RUN":
            steps.append(Run(_program(rest, refuse), env, workdir or "/"))
        else:
            refuse(name)
    if stages == 0:
        raise SandboxUnavailable("the Dockerfile has no FROM")
    return Plan(tuple(steps), env, workdir)


def _instructions(text: str):
    """Yields (line number, NAME, rest) of each instruction, continuations joined, comments left out."""
    gathered, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if ESCAPE.match(line) and not gathered:
            _refuse(number, "escape=`")
        if line.lstrip().startswith("#") or (gathered and not line.strip()):
            continue
        start = start if gathered else number
        if line.rstrip().endswith("\\"):
            gathered += line.rstrip()[:-1] + " "
            continue
        gathered += line
        if gathered.strip():
            yield start, *_split(gathered.strip(), start)
        gathered = ""
    if gathered.strip():
        yield start, *_split(gathered.strip(), start)


def _split(text: str, number: int) -> tuple[str, str]:
    found = INSTRUCTION.fullmatch(text)
    if found is None:
        _refuse(number, f"the line {text!r}")
    return found[1].upper(), found[2]


def _refuse(number: int, what: str):
    raise SandboxUnavailable(
        f"Dockerfile line {number}: {what} is not supported by the namespace sandbox"
        " (FROM, WORKDIR, ENV, COPY, RUN are): use the docker sandbox"
    )


def _expand(text: str, env: Mapping[str, str]) -> str:
    """Replaces $NAME, ${NAME}, ${NAME:-word}, ${NAME:+word}; an unset variable is empty."""

    def value(found: re.Match) -> str:
        if found[1] is not None:
            return found[1]
        name = found[2] or found[5]
        if found[3] == "+":
            return found[4] if env.get(name) else ""
        return env.get(name) or (found[4] or "" if found[3] else "")

    return VARIABLE.sub(value, text)


def _variables(rest: str, env: Mapping[str, str], refuse) -> dict[str, str]:
    """ENV A=1 B="two words", or the old form ENV A value."""
    if "=" not in rest.split()[0]:
        name, _, value = rest.partition(" ")
        return {name: _expand(value.strip(), env)}
    found = {}
    for word in _words(rest, refuse):
        name, equals, value = word.partition("=")
        if not equals:
            refuse(f"ENV {word}")
        found[name] = _expand(value, env)
    return found


def _words(rest: str, refuse) -> list[str]:
    if "'" in rest and "$" in rest:  # would have to stay as it is
        refuse("a $ near single quotes")
    rest = rest.replace("\\$", "\\\\$")  # is for _expand to see
    try:
        return shlex.split(rest)
    except ValueError as error:
        refuse(f"{rest!r} ({error})")


def _program(rest: str, refuse) -> tuple[str, ...]:
    """The argument list of RUN: a JSON array as it stands, any other text by /bin/sh."""
    if rest.startswith("--"):
        refuse(f"RUN {rest.split()[0]}")
    if re.search(r"<<-?['\"]?\w", rest):
        refuse("RUN with a here-document")
    if rest.startswith("["):
        try:
            return tuple(json.loads(rest))
        except ValueError:
            pass  # as Docker has it, this is shell text then: a [ test ]
    return ("/bin/sh", "-c", rest)


def _copies(rest, env, workdir, folders, environment: Path, refuse) -> list[Copy]:
    """COPY source... target, or its JSON form."""
    try:
        words = json.loads(rest) if rest.startswith("[") else _words(rest, refuse)
    except ValueError:
        refuse(f"COPY {rest}")
    words = [_expand(word, env) for word in words]
    for word in words:
        if word.startswith("--"):
            refuse(f"COPY {word}")
    if len(words) < 2 or any(word.startswith("<<") for word in words):
        refuse(f"COPY {rest}")
    *patterns, target = words
    into = target.endswith("/") or _join(workdir, target) in folders
    target = _join(workdir, target)
    if f"{target}/".startswith(READ_ONLY):
        refuse(f"COPY to {target}, which is read-only or the system's,")
    sources = [path for pattern in patterns for path in _sources(pattern, environment, refuse)]
    into = into or len(sources) > 1
    return [
        Copy(path, posixpath.join(target, path.name) if into and not path.is_dir() else target)
        for path in sources
    ]


def _sources(pattern: str, environment: Path, refuse) -> list[Path]:
    inside = os.path.normpath(pattern.lstrip("/"))
    if inside.startswith(".."):
        refuse(f"COPY {pattern} from outside the folder")
    found = sorted(glob.glob(inside, root_dir=environment, include_hidden=True))
    if not found:
        refuse(f"COPY {pattern}, of which there is nothing,")
    return [environment / path for path in found]


def _join(workdir: str | None, path: str) -> str:
    return posixpath.normpath(posixpath.join("/", workdir or "/", path))
