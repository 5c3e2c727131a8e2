"""The image of a task: built from its environment folder or pulled, once for each content and host."""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import re
import stat
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import docker
import docker.utils
import requests
import urllib3

from t1jax.sandbox import docker_api
from t1jax.sandbox.protocol import SandboxError
from t1jax.sandbox.spawner import SandboxUnavailable
from t1jax.types import Task

LABELS = {"t1jax": "image"}  # `docker image prune --all --filter label=t1jax=image` forgets them
COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
NOISE = ("Step ", " ---> ", "Removing intermediate", "The command ")  # of the builder's own lines
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclasses.dataclass(frozen=True)
class Image:
    """What a container needs to know of its image."""

    id: str
    env: Mapping[str, str]
    workdir: str | None


def name(task: Task) -> str:
    """The image a task names, or the tag of what its environment folder holds now.

    Raises SandboxUnavailable where it has neither, or needs several containers.
    """
    for compose in COMPOSE:
        if (task.environment / compose).exists():
            raise SandboxUnavailable(
                f"{task.environment / compose}: tasks of several containers are not supported"
            )
    if task.docker_image:
        return task.docker_image
    if not (task.environment / "Dockerfile").is_file():
        raise SandboxUnavailable(
            f"{task.environment / 'Dockerfile'} is missing, and task.toml names no environment.docker_image"
        )
    return f"t1jax/environment:{_digest(task.environment, _listing(task.environment))}"


def make(api: docker.APIClient, task: Task, tag: str) -> Image:
    """The image `tag` of a task, built or pulled where the host does not have it. Blocks.

    One build of a content at a time, whichever process asks. Raises SandboxError with the builder's last
    word, or when `task.build_timeout_s` is over.
    """
    deadline = time.monotonic() + task.build_timeout_s
    with _alone(f"{api.base_url} {tag}", deadline):
        if not api.images(tag, quiet=True):
            (_pull if task.docker_image else _build)(api, task, tag, deadline)
        config = api.inspect_image(tag)
    return _checked(config, tag)


def _checked(inspected: dict, tag: str) -> Image:
    config = inspected.get("Config") or {}
    user = (config.get("User") or "root").partition(":")[0]
    if user not in ("root", "0"):
        raise SandboxUnavailable(
            f"image {tag} runs as USER {user}: agents and verifiers run as root here, end its Dockerfile with"
            " USER root"
        )
    env = dict(line.partition("=")[::2] for line in config.get("Env") or ())
    return Image(inspected["Id"], env, config.get("WorkingDir") or None)


def _build(api: docker.APIClient, task: Task, tag: str, deadline: float) -> None:
    folder = task.environment
    ignored = folder / ".dockerignore"
    patterns = ignored.read_text().splitlines() if ignored.exists() else []
    exclude = [p.strip() for p in patterns if p.strip() and not p.startswith("#")]
    params = {"t": tag, "rm": 1, "forcerm": 1, "labels": json.dumps(LABELS)}
    with docker.utils.tar(str(folder), exclude, ("Dockerfile", None)) as context:
        _last_words(api, f"build of {folder}", "/build", params, deadline, context)


def _pull(api: docker.APIClient, task: Task, tag: str, deadline: float) -> None:
    repository, version = docker.utils.parse_repository_tag(tag)
    params = {"fromImage": repository, "tag": version or "latest"}
    _last_words(api, f"pull of {tag}", "/images/create", params, deadline)


def _last_words(
    api: docker.APIClient,
    what: str,
    path: str,
    params: Mapping[str, object],
    deadline: float,
    data: IO[bytes] | None = None,
) -> None:
    """Follows a build or pull to its end, and cuts it off at the deadline. Raises SandboxError."""
    seconds = max(deadline - time.monotonic(), 1.0)
    late = SandboxError(
        f"{what} took longer than its {seconds:.0f} s (environment.build_timeout_sec)"
    )
    headers = {"Content-Type": "application/x-tar"}
    said, error = "", ""
    try:
        with docker_api.streamed(
            api, "POST", path, data=data, params=params, headers=headers, timeout=seconds
        ) as reply:
            # The daemon gives up when the connection ends; another thread can end it while this one reads.
            timer = threading.Timer(deadline - time.monotonic(), reply.raw.shutdown)
            timer.start()
            try:
                for line in reply.iter_lines():
                    event = json.loads(line)
                    error = event.get("error", error)
                    said = _useful(event.get("stream", "")) or said
            finally:
                timer.cancel()
    except docker.errors.APIError as refused:
        raise SandboxError(f"{what}: {refused.explanation}") from None
    except (requests.RequestException, urllib3.exceptions.HTTPError, ValueError) as broken:
        if time.monotonic() >= deadline:
            raise late from None
        raise SandboxError(f"{what}: the daemon's answer broke off ({broken})") from None
    if time.monotonic() >= deadline:
        raise late
    if error:
        raise SandboxError(f"{what}: {error.strip()}" + (f": {said}" if said else ""))


def _useful(text: str) -> str:
    text = COLOUR.sub("", text)
    lines = [line.strip() for line in text.splitlines() if not line.startswith(NOISE)]
    return next((line for line in reversed(lines) if line), "")


@contextlib.contextmanager
def _alone(what: str, deadline: float) -> Iterator[None]:
    """At most one of this user's processes and threads on this machine is inside for the same `what`."""
    folder = Path(tempfile.gettempdir(), f"t1jax-docker-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    with open(folder / hashlib.blake2b(what.encode(), digest_size=16).hexdigest(), "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise SandboxError(f"{what} is still being made by another process") from None
                time.sleep(0.1)
        yield


def _listing(folder: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Path, mode, size and time of change of all there is: changes when the content does."""
    found = []
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        found.append(
            (str(path.relative_to(folder)), status.st_mode, status.st_size, status.st_mtime_ns)
        )
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _digest(folder: Path, listing: tuple[tuple[str, int, int, int], ...]) -> str:
    """16 hexadecimal digits of the names, modes and bytes of a folder."""
    digest = hashlib.blake2b(digest_size=8)
    for relative, mode, *_ in listing:
        path = folder / relative
        data = b""
        if stat.S_ISLNK(mode):
            data = os.fsencode(path.readlink())
        elif stat.S_ISREG(mode):
            with path.open("rb") as file:
                data = hashlib.file_digest(file, "blake2b").digest()
        kind = stat.S_IFMT(mode) | mode & 0o777
        digest.update(json.dumps([relative, kind, len(data)]).encode() + data)
    return digest.hexdigest()
