"""Which kind of sandbox a run uses, and making them."""

import contextlib
import dataclasses
import functools
from collections.abc import Awaitable, Callable, Iterator
from typing import Literal

from t1jax.sandbox.docker import DockerSandbox
from t1jax.sandbox.docker_hosts import DockerConfig, DockerHosts
from t1jax.sandbox.namespace import NamespaceSandbox, check_available
from t1jax.sandbox.protocol import Sandbox
from t1jax.types import Task

MakeSandbox = Callable[[Task, int], Awaitable[Sandbox]]  # the int: bytes kept of a command's output


@dataclasses.dataclass(frozen=True)
class SandboxConfig:
    """Where the agent works: "namespace", embedded and without a network, or "docker"."""

    kind: Literal["namespace", "docker"]
    docker: DockerConfig

    @property
    def fresh_verifier(self) -> bool:
        """Whether tests run in a fork; the namespace sandbox has none."""
        return self.kind == "docker" and self.docker.fresh_verifier


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
