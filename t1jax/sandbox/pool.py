"""Which kind of sandbox a run uses, and making them."""

import contextlib
import dataclasses
import functools
from collections.abc import Awaitable, Callable, Iterator
from typing import Literal

from t1jax.sandbox.docker import DockerSandbox
from t1jax.sandbox.docker_hosts import DockerConfig, DockerHosts
from t1jax.sandbox.namespace import NamespaceSandbox, check_available
from t1jax.types import Sandbox, Task

MakeSandbox = Callable[[Task, int], Awaitable[Sandbox]]  # the int: bytes kept of a command's output


@dataclasses.dataclass(frozen=True)
class SandboxConfig:
    """Where the agent works: "namespace", embedded and without a network, or "docker".

    fresh_verifier: tests run in a fork of the sandbox, which no process of the agent's has ever been in; takes
    about a second.
    """

    kind: Literal["namespace", "docker"]
    fresh_verifier: bool
    docker: DockerConfig

    def __post_init__(self):
        if self.kind == "namespace" and self.fresh_verifier:
            raise ValueError("fresh_verifier needs kind=docker: the namespace sandbox has no forks")


@contextlib.contextmanager
def open_sandboxes(config: SandboxConfig) -> Iterator[MakeSandbox]:
    """The configured kind. Raises SandboxUnavailable, with one line, where this machine has none."""
    if config.kind == "namespace":
        check_available()
        yield NamespaceSandbox.start
        return
    hosts = DockerHosts(config.docker)
    try:
        hosts.check()
        yield functools.partial(DockerSandbox.start, hosts)
    finally:
        hosts.close()
