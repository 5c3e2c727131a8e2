"""What trials cost beside the policy: the orchestrator's part of a turn, and whole trials a second.

Trials run through the real loop, sandbox and verifier; a script stands for the policy. Two measurements for each
kind of sandbox; containers are those of the daemon that $DOCKER_HOST names (bash launch/dockerd.sh starts one) and of
the image of launch/base_image.sh:

    overhead    TRIALS at a time, each reply taking REPLY_S on average as a policy's would: milliseconds of a turn
                that are neither the reply's nor the command's (the sandbox's own count), median and 95th percentile
    trials/s    replies take no time: start, TURNS commands, verifier, removal

beside as many bare `docker run --rm` of the same image, as many at a time, in the same run.
"""

import asyncio
import contextlib
import dataclasses
import functools
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from t1jax.agent.chat import Chat
from t1jax.agent.episode import EpisodeConfig
from t1jax.agent.generate import instances, write_task
from t1jax.agent.script import ScriptSampler
from t1jax.agent.task import load_task
from t1jax.rollout.collect import CollectConfig, Trial, collect
from t1jax.sandbox.docker import DockerSandbox
from t1jax.sandbox.docker_hosts import DockerConfig, DockerHosts
from t1jax.sandbox.namespace import NamespaceSandbox
from t1jax.sandbox.pool import MakeSandbox
from t1jax.types import Sampled, Task, Trajectory

TOKENIZER = Path("configs/assets/tiny/tokenizer.json")
IMAGE = "t1jax/base:bookworm"
TRIALS, TURNS, REPLY_S = 64, 8, 0.5
STARTS = 16  # at a time, where trials a second are counted
EPISODE = EpisodeConfig(
    protocol="bash",
    history="tokens",
    max_turns=TURNS + 1,
    max_context=4000,
    max_reply=100,
    compact_below=0,
    max_summary=0,
    command_timeout_s=60.0,
    turn_timeout_s=300.0,
    agent_timeout_s=600.0,
    trial_timeout_s=900.0,
    max_output_bytes=10_000,
)
COLLECT = CollectConfig(
    episode=EPISODE,
    temperature=1.0,
    reward_kind="dense",
    reward_scale=20.0,
    concurrency=TRIALS,
    max_attempts=1,
    max_infra_share=0.0,
)


class Slow(ScriptSampler):
    """Says "true" TURNS times and submits. A reply takes `mean_s` seconds on average."""

    def __init__(self, chat: Chat, mean_s: float):
        super().__init__(chat, dict.fromkeys(range(TRIALS), ("true",) * TURNS))
        self._mean_s, self._rng = mean_s, random.Random(0)
        self.seconds: dict[tuple[int, int], float] = {}  # slept for a reply, by trial and turn

    async def sample(self, trial, turn, tokens, experts_start, max_new) -> Sampled:
        seconds = self._mean_s * self._rng.uniform(0.5, 1.5)
        started = time.monotonic()
        if seconds:
            await asyncio.sleep(seconds)
        # Waking up late is the orchestrator's.
        self.seconds[trial, turn] = min(seconds, time.monotonic() - started)
        return await super().sample(trial, turn, tokens, experts_start, max_new)


def bench() -> dict:
    """{"ratios", "ms", "per_s"}: see the top; a ratio is of trials a second to bare containers a second."""
    chat, out = Chat(TOKENIZER), {"ratios": {}, "ms": {}, "per_s": {}}
    with tempfile.TemporaryDirectory() as folder, pool() as hosts:
        task = make_task(Path(folder))
        kinds = {
            "namespace": NamespaceSandbox.start,
            "docker": functools.partial(DockerSandbox.start, hosts),
        }
        out["per_s"]["docker run"] = bare = run_containers(hosts.config.hosts[0])
        print(f"docker run {bare:5.1f} containers/s", flush=True)
        for kind, start in kinds.items():
            overhead = measure_overhead(chat, task, start)
            rate = measure_rate(chat, task, start)
            median, high = statistics.median(overhead), np.percentile(overhead, 95)
            out["ms"] |= {f"{kind}_median": round(median, 2), f"{kind}_p95": round(float(high), 2)}
            out["per_s"][kind] = round(rate, 1)
            out["ratios"][kind] = round(rate / bare, 2)
            print(
                f"{kind:10} overhead of a turn {median:6.2f} ms (95 %: {high:6.2f}), "
                f"{rate:5.1f} trials/s",
                flush=True,
            )
    return out


@contextlib.contextmanager
def pool() -> Iterator[DockerHosts]:
    hosts = DockerHosts(DockerConfig(starts_per_s=1000.0))
    try:
        hosts.check()
        yield hosts
    finally:
        hosts.close()


def make_task(folder: Path) -> Task:
    write_task(folder / "task", next(instances("train", 0)), "train", 0)
    dockerfile = folder / "task/environment/Dockerfile"
    dockerfile.write_text(dockerfile.read_text().replace("debian:bookworm-slim", IMAGE))
    return load_task(folder / "task")


def run_containers(host: str) -> float:
    """Bare containers a second."""
    command = ["docker", "--host", host, "run", "--rm", "--network=none", IMAGE, "true"]
    begun = time.perf_counter()
    with ThreadPoolExecutor(STARTS) as threads:
        done = list(threads.map(lambda _: subprocess.run(command, check=True), range(TRIALS)))
    return len(done) / (time.perf_counter() - begun)


def measure_overhead(chat: Chat, task: Task, start: MakeSandbox) -> list[float]:
    """Milliseconds of each turn but the last that are neither the reply's nor the command's."""
    sampler = Slow(chat, REPLY_S)
    return [
        1e3 * (turn.seconds - sampler.seconds[t.trial, i] - turn.result.seconds)
        for t in run(chat, task, start, sampler)
        for i, turn in enumerate(t.turns[:-1])
    ]


def measure_rate(chat: Chat, task: Task, start: MakeSandbox) -> float:
    """Trials a second with a policy that takes no time."""
    begun = time.perf_counter()
    run(chat, task, start, Slow(chat, 0.0), concurrency=STARTS)
    return TRIALS / (time.perf_counter() - begun)


def run(chat: Chat, task: Task, start: MakeSandbox, sampler, **changes) -> list[Trajectory]:
    trials = [Trial(task, i) for i in range(TRIALS)]
    config = dataclasses.replace(COLLECT, **changes)
    return asyncio.run(collect(trials, start, sampler, chat, config))
