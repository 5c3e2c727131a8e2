"""The embedded sampler beside transformers and SGLang: replies of REPLY tokens to prompts of PROMPT.

All streams are asked for at once and none shares a prefix. Here and in SGLang the reply comes with its log-probs
and experts, in SGLang over HTTP; transformers gives ids alone. SGLang runs on this CPU as tests run it: float32,
no prefix cache, with one thread and with two, of which the faster counts. Its delta nets are those of
launch/engine/delta_net.py, plain torch, since it has none for a CPU without AMX. They read prompts token by token,
which at 16 streams is a fifth of its time.
"""

import asyncio
import contextlib
import functools
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from t1jax.bench.reference import MODEL, side_by_side
from t1jax.bench.turns import seconds_of, take_turns
from t1jax.engine import JaxSampler
from t1jax.model.hf_config import hf_sizes
from t1jax.rollout import server
from t1jax.rollout.sglang import Engine, EngineModel, Settings
from t1jax.types import SamplerError, Sampling

STREAMS = (1, 4, 16, 32)
PROMPT, REPLY = 64, 64  # tokens of a stream
SAMPLING = Sampling(1.0, 1.0, 0)
THREADS = (1, 2)  # of SGLang
SGLANG = server.ServerConfig(
    python=".venv-sglang/bin/python",
    device="cpu",
    dtype="float32",
    max_running=max(STREAMS),
    max_tokens=2 * max(STREAMS) * (PROMPT + REPLY),
    start_timeout_s=300.0,
    flags="--weight-version 0 --disable-radix-cache",
)
LOGS = Path("runs/bench")


def bench() -> dict:
    """{"ratios"}: sampled tokens a second by number of streams, here to there."""
    ratios = {}
    with side_by_side() as (params, checkpoint, reference), engines(checkpoint) as urls:
        header = f"{'streams':>7}{'t1jax tok/s':>13}{'transformers':>14}{'ratio':>7}"
        print(header + (f"{'SGLang':>9}{'ratio':>7}" if urls else ""))
        for streams in STREAMS:
            with contextlib.closing(make_sampler(streams)) as sampler:
                sampler.load(params, 0)
                sampler.warm_up()
                sides = [
                    [functools.partial(seconds_of, functools.partial(sample, sampler, streams))],
                    reference.ways(task="generate", rows=streams, length=PROMPT, new=REPLY),
                    [functools.partial(sample_sglang, url, streams) for url in urls],
                ]
                ours, *theirs = take_turns(*filter(None, sides))
            ratios |= {
                f"{name}_{streams}": round(other / ours, 2)
                for name, other in zip(("streams", "sglang"), theirs, strict=False)
            }
            tokens = streams * REPLY
            row = (
                f"{streams:7}{tokens / ours:13.0f}{tokens / theirs[0]:14.0f}{theirs[0] / ours:7.2f}"
            )
            if urls:
                row += f"{tokens / theirs[1]:9.0f}{theirs[1] / ours:7.2f}"
            print(row, flush=True)
    return {"ratios": ratios}


def make_sampler(streams: int) -> JaxSampler:
    return JaxSampler(
        MODEL,
        slots=streams,
        max_len=PROMPT + REPLY,
        prefill_rows=min(streams, 8),
        prefill_buckets=(PROMPT,),
        seed=0,
        sampling=SAMPLING,
        stop_ids=(),
    )


def prompt(stream: int) -> np.ndarray:
    ids = np.random.default_rng(stream).integers(0, MODEL.vocab_size, PROMPT)
    return ids.astype(np.int32)


def sample(sampler: JaxSampler, streams: int) -> None:
    """One reply of REPLY tokens for each stream, all at once."""

    async def one(trial: int):
        await sampler.sample(trial, 0, prompt(trial), 0, REPLY)
        await sampler.release(trial)

    async def every():
        await asyncio.gather(*map(one, range(streams)))

    asyncio.run(every())


def sample_sglang(url: str, streams: int) -> float:
    """Seconds of the same. Raises SamplerError where a reply is short."""
    model = EngineModel(hf_sizes(MODEL), PROMPT + REPLY)

    async def every() -> float:
        engine = Engine(url, model, Settings((), reply_timeout_s=300.0, control_timeout_s=10.0))
        asked = [engine.generate(prompt(i), 0, REPLY, SAMPLING, 0) for i in range(streams)]
        try:
            start = time.perf_counter()
            replies = await asyncio.gather(*asked)
            seconds = time.perf_counter() - start
        finally:
            await engine.close()
        if any(len(reply.ids) != REPLY for reply in replies):
            raise SamplerError(f"{url}: a reply of fewer than {REPLY} tokens")
        return seconds

    return asyncio.run(every())


@contextlib.contextmanager
def engines(checkpoint: Path) -> Iterator[list[str]]:
    """Addresses of SGLang servers, one for each number of threads; none where it is not installed."""
    if not (server.ROOT / SGLANG.python).exists():
        print("SGLang is left out: bash launch/setup.sh --sglang installs it")
        yield []
        return
    servers = []

    async def ready():
        await asyncio.gather(*(server.wait_ready(s, SGLANG.start_timeout_s) for s in servers))

    try:
        for n in THREADS:
            servers.append(server.start(SGLANG, checkpoint, LOGS / f"sglang-{n}.log", threads=n))
        asyncio.run(ready())
        yield [one.url for one in servers]
    finally:
        for one in servers:
            server.stop(one)
