"""SGLang servers as processes: started, waited for, stopped. One server is one engine.

A server runs launch/engine/server.py in a session of its own, in an environment that has SGLang, and logs into a
file. It ends when the thread that started it does, so that no engine outlives its run. One that runs already,
wherever, is `found` by its address.
"""

import asyncio
import contextlib
import dataclasses
import os
import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Literal

import aiohttp

from t1jax.types import SamplerError

ROOT = Path(__file__).parents[2]
CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    # An idle engine would keep a core busy that the trainer needs. A limit, not a size, which max_tokens gives: what
    # others take while an engine starts counts as its own.
    *("--mem-fraction-static", "0.3", "--disable-cuda-graph", "--sleep-on-idle"),
    # Qwen3.5's delta nets; harmless for the others.
    *("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"),
)
CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_MAMBA_CONV_DTYPE": "float32",  # bfloat16 puts log-probs off by 2.5 nats
}
TAIL_BYTES = 100_000
# Huge pages: a long reply passes through several fresh buffers of up to 17 MB, whose page faults cost more than
# what is done in them.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# Set by `start`, from the other fields of ServerConfig and its arguments.
OWN_FLAGS = {
    *("--model-path", "--model", "--dtype", "--device", "--host", "--port"),
    *("--max-running-requests", "--max-total-tokens", "--skip-tokenizer-init"),
    *("--enable-return-routed-experts", "--base-gpu-id"),
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """What a server serves. `flags`: more of SGLang's own, as in a shell.

    Raises ValueError for a number that is not positive, and for flags that cannot be.
    """

    python: str  # that has SGLang; relative to the project's root
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    max_running: int  # requests at a time
    max_tokens: int  # of all requests together, cached ones included
    start_timeout_s: float
    flags: str

    def __post_init__(self):
        for name in ("max_running", "max_tokens", "start_timeout_s"):
            if not (value := getattr(self, name)) > 0:
                raise ValueError(f"{name}={value} must be positive")
        try:
            names = {flag.partition("=")[0] for flag in shlex.split(self.flags)}
        except ValueError as error:
            raise ValueError(f"flags={self.flags!r}: {error}") from None
        if own := names & OWN_FLAGS:
            raise ValueError(f"flags={self.flags!r}: {min(own)} is set by t1jax")


@dataclasses.dataclass(frozen=True)
class Server:
    """url: "http://HOST:PORT". Its part of the log begins at `begin`. process: None where others run it."""

    process: subprocess.Popen | None
    url: str
    log: Path
    begin: int


def start(
    config: ServerConfig,
    model: Path,
    log: Path,
    index: int = 0,
    threads: int = 1,
    host: str = "127.0.0.1",
) -> Server:
    """Starts a server of the Hugging Face checkpoint `model`; see `wait_ready`.

    index: which of the machine's GPUs it uses. threads: of a server on the CPU; those of a tiny model wait for
    each other. Raises SamplerError where SGLang is not installed, or nobody can listen at `host`.
    """
    python = ROOT / Path(config.python).expanduser()
    try:
        port = free_port(host)
    except OSError as error:
        raise SamplerError(f"no server can listen at {host}: {error.strerror}") from None
    if not (python.is_file() and os.access(python, os.X_OK)):
        raise SamplerError(
            f"{python} is no program: run bash launch/setup.sh --sglang (for a CPU), or name a Python that has "
            "SGLang (fleet.server.python)"
        )
    if config.device == "cpu":
        environment = CPU_ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)}
        device = (*CPU_FLAGS, "--max-mamba-cache-size", 4 * config.max_running)
    else:
        environment, device = {}, ("--base-gpu-id", index)
    arguments = (
        *(python, ROOT / "launch" / "engine" / "server.py", *device),
        *("--model-path", model, "--dtype", config.dtype, "--host", host, "--port", port),
        *("--max-running-requests", config.max_running, "--max-total-tokens", config.max_tokens),
        *("--enable-return-routed-experts", "--skip-tokenizer-init", *shlex.split(config.flags)),
    )
    parent = {"ENGINE_PARENT": str(os.getpid())}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        begin = output.tell()
        process = subprocess.Popen(
            [str(x) for x in arguments],
            env={**HUGE_PAGES, **os.environ, **OFFLINE, **environment, **parent},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Server(process, f"http://{host}:{port}", log, begin)


def found(url: str) -> Server:
    """A server that others have started, with launch/sglang.py say."""
    return Server(None, url.rstrip("/"), Path(), 0)


async def wait_ready(server: Server, timeout_s: float) -> None:
    """Returns when the server answers; raises SamplerError where it ends or is too slow, after stopping it."""
    until = time.monotonic() + timeout_s
    try:
        async with aiohttp.ClientSession() as session:
            while not await _healthy(session, server.url):
                if cause := ended(server):
                    raise SamplerError(cause)
                if time.monotonic() > until:
                    where = tail(server) if server.process else f"nothing answers at {server.url}"
                    raise SamplerError(f"no server after {timeout_s:g} s: {where}")
                await asyncio.sleep(0.5)
    except BaseException:
        await asyncio.to_thread(stop, server)
        raise


def stop(server: Server, grace_s: float = 10.0) -> None:
    """Ends the server and all processes it made; without `grace_s` at once. Idempotent.

    One that others run is left alone.
    """
    if server.process is None:
        return
    for sign, seconds in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, sign)
            os.killpg(server.process.pid, signal.SIGCONT)  # a stopped process hears no SIGTERM
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(seconds)
            break
    # Workers that outlived the main process.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGKILL)


def ended(server: Server) -> str | None:
    """Why the server is no more, None while it runs, or where others run it."""
    code = server.process and server.process.poll()
    return None if code is None else f"the server ended with {code}: {tail(server)}"


def tail(server: Server) -> str:
    """Where the log is, and the server's last line there that names an error."""
    text = b""
    with contextlib.suppress(FileNotFoundError), server.log.open("rb") as log:
        log.seek(max(server.begin, log.seek(0, os.SEEK_END) - TAIL_BYTES))
        text = log.read()
    lines = text.decode(errors="replace").splitlines()
    errors = [line.strip() for line in lines if "Error" in line or ": error: " in line]
    return f"{errors[-1]} ({server.log})" if errors else f"see {server.log}"


def free_port(host: str) -> int:
    """Raises OSError for an address that is not this machine's."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


async def _healthy(session: aiohttp.ClientSession, url: str) -> bool:
    """Whether the server generates: /health answers after a token was made."""
    timeout = aiohttp.ClientTimeout(total=10)
    try:
        async with session.get(f"{url}/health", timeout=timeout) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
