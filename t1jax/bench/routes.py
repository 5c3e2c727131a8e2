"""Routed experts of one trial on their way from an engine to the host: 32,768 tokens x 48 layers x top-8.

A process of its own (routes_server.py) answers as an engine does, without a model; the client is the one that
training uses. What a trial costs is the time of its calls less that of the same calls asked for one row of
experts. It is shown by parts, in milliseconds:

    gather    rows out of the engine's buffer, narrowed       pass    to the process that answers
    encode    base64                                          dump    JSON
    send      HTTP: what is left of the calls                 load    JSON
    decode    base64, and all checks                          join    one array, as it is stored

as one reply, and as 50 turns of which each brings the rows since the last. "int32" is what SGLang sends by itself;
the ratios compare with it. With GLIBC_TUNABLES=glibc.malloc.hugetlb=1, which engines are given, the client saves
page faults, too: they are most of what it does with one large reply.
"""

import asyncio
import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import aiohttp
import numpy as np
import orjson

from t1jax.bench.routes_server import dump, encode
from t1jax.bench.turns import best_of
from t1jax.experiment import ConfigError
from t1jax.rollout.server import HUGE_PAGES, free_port
from t1jax.rollout.sglang import Engine, EngineModel, Settings, read_experts
from t1jax.types import Sampling

TOKENS, LAYERS, TOP, EXPERTS, TURNS = 32_768, 48, 8, 256, 50
SIZES = {
    "vocab_size": 1000,
    "num_hidden_layers": LAYERS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP,
}
MODEL = EngineModel(SIZES, TOKENS + 1)
FORMS = {"narrow": np.uint8, "int32": np.int32}
SERVER_PARTS = ("gather", "pass", "encode", "dump")
PARTS = (*SERVER_PARTS, "send", "load", "decode", "join")
ROUNDS = 7


def bench() -> dict:
    """{"ratios", "ms"}: by way, and by way and form."""
    ms, ratios = {}, {}
    print(f"{'ms':16}" + "".join(f"{name:>8}" for name in (*PARTS, "all")))
    with serving() as url:
        for way, turns in (("whole", split(1)), ("turns", split(TURNS))):
            for form, dtype in FORMS.items():
                parts = asyncio.run(cost(url, form, turns)) | client_parts(turns, dtype)
                parts["send"] -= parts["load"] + parts["decode"]
                total = sum(parts.values())
                ms[f"{way}_{form}"] = round(total, 1)
                cells = "".join(f"{t:8.1f}" for t in (*(parts[name] for name in PARTS), total))
                print(f"{way} as {form}".ljust(16) + cells, flush=True)
            ratios[way] = round(ms[f"{way}_int32"] / ms[f"{way}_narrow"], 2)
    return {"ratios": ratios, "ms": ms}


def split(turns: int) -> list[tuple[int, int]]:
    """[start, end) of the tokens whose experts each turn brings."""
    edges = np.linspace(0, TOKENS, turns + 1).astype(int).tolist()
    return list(itertools.pairwise(edges))


async def cost(url: str, form: str, turns: list[tuple[int, int]]) -> dict[str, float]:
    """Milliseconds by part of the best of ROUNDS; "send" holds the client's work, too."""
    bare = [(end - 1, end) for _, end in turns]
    rounds = [(await ask(url, form, turns), await ask(url, form, bare)) for _ in range(ROUNDS)]
    least = [min(side, key=lambda parts: parts["calls"]) for side in zip(*rounds, strict=True)]
    parts = {name: least[0][name] - least[1][name] for name in least[0]}
    parts["send"] = parts.pop("calls") - sum(parts[name] for name in SERVER_PARTS)
    return parts


async def ask(url: str, form: str, turns: list[tuple[int, int]]) -> dict[str, float]:
    """Milliseconds of the calls, of the server's parts of them, and of joining what they brought."""
    engine = Engine(f"{url}/{form}", MODEL, Settings((), 60.0, 60.0))
    tokens, sampling = np.zeros(TOKENS, np.int32), Sampling(1.0, 1.0, 0)
    async with aiohttp.ClientSession() as session:
        try:
            await engine.healthy(60.0)  # opens the connection
            await take_times(session, url)
            start = time.perf_counter()
            replies = [
                await engine.generate(tokens[:end], begin, 1, sampling, 0) for begin, end in turns
            ]
            calls = time.perf_counter() - start
            parts = await take_times(session, url)
        finally:
            await engine.close()
    start = time.perf_counter()
    np.concatenate([reply.experts for reply in replies])
    seconds = parts | {"calls": calls, "join": time.perf_counter() - start}
    return {name: 1e3 * t for name, t in seconds.items()}


async def take_times(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """The server's seconds by part since it was last asked."""
    async with session.get(f"{url}/times") as answer:
        return orjson.loads(await answer.read())


def client_parts(turns: list[tuple[int, int]], dtype: type) -> dict[str, float]:
    """Milliseconds of the client's own work on such replies, each alone."""
    blank = [np.zeros((end - begin, LAYERS, TOP), dtype) for begin, end in turns]
    bodies = [dump(encode(rows), end) for rows, (_, end) in zip(blank, turns, strict=True)]
    texts = [orjson.loads(body)["meta_info"]["routed_experts"] for body in bodies]

    def load():
        for body in bodies:
            orjson.loads(body)

    def decode():
        for (begin, end), text in zip(turns, texts, strict=True):
            read_experts(text, end, begin, MODEL, (dtype().itemsize,))

    return {"load": 1e3 * best_of(load, ROUNDS), "decode": 1e3 * best_of(decode, ROUNDS)}


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """The address of routes_server.py in a process of its own."""
    port = free_port("127.0.0.1")
    shape = map(str, (port, TOKENS, LAYERS, TOP, EXPERTS))
    process = subprocess.Popen(
        [sys.executable, "-m", "t1jax.bench.routes_server", *shape],
        env={**HUGE_PAGES, **os.environ},  # as engines have it
        stdout=subprocess.PIPE,
    )
    try:
        if not process.stdout.readline():
            raise ConfigError("t1jax.bench.routes_server did not start")
        yield f"http://127.0.0.1:{port}"
    finally:
        with process:
            process.kill()
