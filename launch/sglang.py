"""Starts SGLang engines of a Hugging Face checkpoint, and stops them when it is stopped.

    python launch/sglang.py --checkpoint=HF_FOLDER --engines=2                  one engine a GPU
    python launch/sglang.py --checkpoint=HF_FOLDER --engines=1 --device=cpu     see launch/setup.sh --sglang

When all are ready, one line with their addresses is printed: what a run takes as --config.fleet.urls. Further flags
of SGLang go behind "--".
"""

import asyncio
import shlex
import signal
import socket
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from absl import flags

from t1jax import command
from t1jax.rollout import server


async def wait_all(servers: list[server.Server], timeout_s: float) -> None:
    async with asyncio.TaskGroup() as group:
        for one in servers:
            group.create_task(server.wait_ready(one, timeout_s))


def main() -> None:
    config = server.ServerConfig(
        python=PYTHON.value,
        device=DEVICE.value,
        dtype=DTYPE.value,
        max_running=MAX_RUNNING.value,
        max_tokens=MAX_TOKENS.value,
        start_timeout_s=TIMEOUT.value,
        flags=shlex.join(further),
    )
    servers = []
    for sign in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sign, interrupt)
    try:
        for i in range(ENGINES.value):
            log = Path(LOGS.value) / f"engine-{i}.log"
            servers.append(server.start(config, Path(CHECKPOINT.value), log, i, host=HOST.value))
        try:
            asyncio.run(wait_all(servers, TIMEOUT.value))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        stopped = threading.Event()
        for sign in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sign, lambda *_: stopped.set())
        # Who listens everywhere is found by name.
        print(*(one.url.replace("//0.0.0.0:", f"//{socket.gethostname()}:") for one in servers))
        sys.stdout.flush()
        while not stopped.wait(1.0):
            for one in servers:
                if one.process.poll() is not None:
                    command.fail(f"an engine ended: {server.tail(one)}")
    finally:
        for sign in (signal.SIGTERM, signal.SIGINT):  # an impatient second one
            signal.signal(sign, signal.SIG_IGN)
        for one in servers:
            server.stop(one)


def interrupt(*_) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    CHECKPOINT = flags.DEFINE_string("checkpoint", None, "A Hugging Face folder.", required=True)
    ENGINES = flags.DEFINE_integer("engines", 1, "How many.", lower_bound=1)
    PYTHON = flags.DEFINE_string("python", ".venv-sglang/bin/python", "One that has SGLang.")
    HOST = flags.DEFINE_string("host", "127.0.0.1", "Where they listen; they trust whoever asks.")
    DEVICE = flags.DEFINE_enum("device", "cuda", ["cpu", "cuda"], "Where they run.")
    DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["float32", "bfloat16"], "Of weights and KV.")
    MAX_RUNNING = flags.DEFINE_integer("max_running", 16, "Requests at a time.", lower_bound=1)
    MAX_TOKENS = flags.DEFINE_integer("max_tokens", 16384, "Of all requests together.", 1)
    TIMEOUT = flags.DEFINE_float("start_timeout_s", 600.0, "Until an engine must be ready.", 1.0)
    LOGS = flags.DEFINE_string("logs", "runs/engines", "The folder for logs.")
    further: list[str] = []
    if "--" in sys.argv:
        at = sys.argv.index("--")
        further, sys.argv = sys.argv[at + 1 :], sys.argv[:at]
    command.run(main)
