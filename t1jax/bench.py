"""Speed beside transformers, in one run on one machine: the same model, weights and threads.

    python -m t1jax.bench model      forward, and forward and backward, at three lengths
    python -m t1jax.bench sampler    the embedded sampler at 1 to 32 streams

Needs .venv-reference (bash launch/setup.sh --reference). `model` takes a row a core: here each row on a CPU
device of its own, as training does, there both in one batch over the same threads. The two sides take turns, each cell is the best of
ROUNDS, and transformers is given the faster of two ways to compute experts. A ratio above 1 means that this
project is faster. The last line printed is a JSON object.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from t1jax import command
from t1jax.engine import JaxSampler, Sampling
from t1jax.experiment import ConfigError
from t1jax.mesh import MeshConfig, make_mesh, replicate
from t1jax.model.config import ModelConfig
from t1jax.model.deltanet import DeltaNet
from t1jax.model.hf import by_path, export_params
from t1jax.model.layers import Attention, make_place
from t1jax.model.lm import init_policy, logits_of, pick_logp, token_logp
from t1jax.model.moe import MoE
from t1jax.ppo import microbatch

MODEL = ModelConfig(
    vocab_size=2048,
    hidden_size=128,
    num_layers=8,
    full_attention_interval=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    delta_k_heads=4,
    delta_v_heads=8,
    delta_k_dim=32,
    delta_v_dim=32,
    num_experts=16,
    experts_per_token=4,
    expert_width=64,
    shared_width=64,
    logp_chunk=512,
)
LENGTHS = (512, 2048, 8192)
STREAMS = (1, 4, 16, 32)
PROMPT, REPLY = 64, 64  # tokens of a stream
EXPERTS = (
    "grouped_mm",
    "eager",
)  # transformers' ways, of which the faster counts; batched_mm is left out
ROUNDS = 3
PYTHON = Path(".venv-reference/bin/python")


class Reference:
    """transformers in its own process and environment: see launch/reference_bench.py."""

    def __init__(self, checkpoint: Path, threads: int):
        if not PYTHON.exists():
            raise ConfigError(f"{PYTHON} is missing: run bash launch/setup.sh --reference")
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by `close`)
        self._process = subprocess.Popen(
            [PYTHON, "launch/reference_bench.py", checkpoint, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def seconds(self, **request) -> float:
        """What the request took there; raises ConfigError where it failed."""
        line = ""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": self._last_words()}
        if "error" in answer:
            raise ConfigError(f"transformers: {answer['error']}")
        return answer["seconds"]

    def close(self) -> None:
        with self._process, self._errors:
            self._process.kill()

    def _last_words(self) -> str:
        self._errors.seek(0)
        return (self._errors.read().strip() or "the process ended").splitlines()[-1]


@contextlib.contextmanager
def side_by_side() -> Iterator[tuple[dict, Reference]]:
    """The same random weights here and there."""
    if jax.default_backend() != "cpu":
        raise ConfigError("transformers runs on the CPU here: set JAX_PLATFORMS=cpu")
    params = init_policy(MODEL, jax.random.key(0))
    with tempfile.TemporaryDirectory() as folder:
        export_params(by_path(params), MODEL, Path(folder))
        reference = Reference(Path(folder), os.cpu_count())
        try:
            yield params, reference
        finally:
            reference.close()


def bench_model() -> dict[str, float]:
    """Ratios of tokens a second by pass and length."""
    rows = os.cpu_count()
    mesh = make_mesh(MeshConfig(rows))
    peak, ratios = gemm_peak(), {}
    print(f"float32 GEMM peak {peak / 1e9:.0f} GFLOP/s, {rows} cores, {rows} rows of T tokens")
    print(f"{'pass':9}{'T':>6}{'t1jax tok/s':>13}{'transformers':>14}{'ratio':>7}{'of peak':>9}")
    with side_by_side() as (params, reference):
        for name, passes in (("forward", 1), ("backward", 3)):
            for T in LENGTHS:
                run = model_pass(params, name, T, mesh)
                ways = {"task": name, "rows": rows, "length": T}
                ours, theirs = take_turns(run, reference, ways)
                share = passes * rows * forward_flops(T) / ours / peak
                ratios[f"{name}_{T}"] = round(theirs / ours, 2)
                print(
                    f"{name:9}{T:6}{rows * T / ours:13.0f}{rows * T / theirs:14.0f}"
                    f"{theirs / ours:7.2f}{share:9.1%}",
                    flush=True,
                )
    parts = time_parts(T=2048)
    shares = ", ".join(f"{name} {t / sum(parts.values()):.0%}" for name, t in parts.items())
    print(f"forward and backward at T = 2048 by parts, each alone: {shares}")
    return ratios


def time_parts(T: int) -> dict[str, float]:
    """Seconds of forward and backward of all layers of a kind, on one row and one device."""
    c, key = MODEL, jax.random.key(0)
    x = jax.random.normal(key, (1, T, c.hidden_size))
    ones = jnp.ones((1, T), jnp.int32)
    place = make_place(jnp.arange(T, dtype=jnp.int32)[None], ones)
    full = c.num_layers // c.full_attention_interval
    head_DV = jax.random.normal(key, (c.hidden_size, c.vocab_size))

    def head(head_DV, x):
        chunks = x.reshape(-1, c.logp_chunk, c.hidden_size)
        pick = lambda h: pick_logp(logits_of(c, h, head_DV), jnp.zeros(len(h), jnp.int32))[0]  # noqa: E731
        return jax.lax.map(jax.checkpoint(pick), chunks)

    def timed(apply, params) -> float:
        loss = lambda params, x: jnp.sum(jnp.sin(apply(params, x)))  # noqa: E731
        run = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, x).compile()
        return best_of(lambda: jax.block_until_ready(run(params, x)), 2 * ROUNDS)

    def layers(count: int, module, *rest) -> float:
        params = module.init(key, x, *rest)
        return count * timed(lambda params, x: module.apply(params, x, *rest)[0], params)

    return {
        "delta nets": layers(c.num_layers - full, DeltaNet(c), place),
        "experts": layers(c.num_layers, MoE(c), ones > 0, None),
        "attention": layers(full, Attention(c), place),
        "head": timed(head, head_DV),
    }


def best_of(run, rounds: int) -> float:
    """The least seconds of a call."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def bench_sampler() -> dict[str, float]:
    """Ratios of sampled tokens a second by number of streams."""
    ratios = {}
    print(f"{'streams':>7}{'t1jax tok/s':>13}{'transformers':>14}{'ratio':>7}")
    with side_by_side() as (params, reference):
        for streams in STREAMS:
            sampler = JaxSampler(
                MODEL,
                slots=streams,
                max_len=PROMPT + REPLY,
                prefill_rows=min(streams, 8),
                prefill_buckets=(PROMPT,),
                seed=0,
                sampling=Sampling(1.0, 1.0, 0),
                stop_ids=(),
            )
            with contextlib.closing(sampler):
                sampler.load(params, 0)
                sampler.warm_up()
                ways = {"task": "generate", "rows": streams, "length": PROMPT, "new": REPLY}
                ours, theirs = take_turns(lambda: sample(sampler, streams), reference, ways)  # noqa: B023
            tokens = streams * REPLY
            ratios[f"streams_{streams}"] = round(theirs / ours, 2)
            print(
                f"{streams:7}{tokens / ours:13.0f}{tokens / theirs:14.0f}{theirs / ours:7.2f}",
                flush=True,
            )
    return ratios


def take_turns(run, reference: Reference, request: dict) -> tuple[float, float]:
    """The least seconds of either side; a first time on both, which compiles and allocates, is left out."""
    ours, theirs = [], []
    for round_ in range(ROUNDS + 1):
        start = time.perf_counter()
        run()
        mine = time.perf_counter() - start
        other = min(reference.seconds(experts=way, **request) for way in EXPERTS)
        if round_:
            ours.append(mine)
            theirs.append(other)
    return min(ours), min(theirs)


def model_pass(params: dict, name: str, T: int, mesh: Mesh):
    """A function that computes the mean token loss of a row a device, or its gradient, and waits for it."""
    shape = mesh.size, T
    ids = np.random.default_rng(0).integers(0, MODEL.vocab_size, shape).astype(np.int32)
    positions = np.broadcast_to(np.arange(T, dtype=np.int32), shape)

    def loss(params, inputs):
        tokens, positions = inputs
        rows = jnp.ones_like(tokens), None, jnp.ones(len(tokens))
        logp, _, _ = token_logp(MODEL, params, tokens, positions, *rows)
        return -jnp.sum(logp) / (mesh.size * (T - 1)), logp

    def forward(params, inputs):
        return microbatch.map_rows(lambda *a: loss(*a)[1], params, inputs, 1, mesh)

    def backward(params, inputs):
        return microbatch.value_and_grad(loss, params, inputs, 1, mesh)[1]

    inputs = (replicate(params, mesh), replicate((ids, positions), mesh))
    compiled = jax.jit(forward if name == "forward" else backward).lower(*inputs).compile()
    return lambda: jax.block_until_ready(compiled(*inputs))


def sample(sampler: JaxSampler, streams: int) -> None:
    """One reply of REPLY tokens for each stream, all at once."""

    async def one(trial: int):
        prompt = np.random.default_rng(trial).integers(0, MODEL.vocab_size, PROMPT)
        await sampler.sample(trial, 0, prompt.astype(np.int32), 0, REPLY)
        await sampler.release(trial)

    async def every():
        await asyncio.gather(*map(one, range(streams)))

    asyncio.run(every())


def forward_flops(T: int) -> float:
    """Of the matrix products of one forward pass over T tokens, two a multiplication."""
    c = MODEL
    D, full = c.hidden_size, c.num_layers // c.full_attention_interval
    attention = D * c.head_dim * (3 * c.num_heads + 2 * c.num_kv_heads)
    scores = (T + 1) * c.num_heads * c.head_dim  # two products with half of the keys on average
    values = c.delta_v_heads * c.delta_v_dim
    delta = D * (c.conv_dim + 2 * values + 2 * c.delta_v_heads)
    memory = 3 * values * c.delta_k_dim  # S^T k, k (x) u and S^T q
    expert = 3 * D * (c.experts_per_token * c.expert_width + c.shared_width)
    moe = expert + D * (c.num_experts + 1)
    layers = full * (attention + scores) + (c.num_layers - full) * (delta + memory)
    return 2.0 * T * (layers + c.num_layers * moe + D * c.vocab_size)


def gemm_peak() -> float:
    """FLOP/s of a float32 product of matrices of 2048 x 2048, the best of ten."""
    a = jax.random.normal(jax.random.key(0), (2048, 2048))
    multiply = jax.jit(jnp.matmul).lower(a, a).compile()
    return 2 * 2048**3 / best_of(lambda: jax.block_until_ready(multiply(a, a)), 10)


BENCHES = {"model": bench_model, "sampler": bench_sampler}


def main(name: str) -> None:
    print(json.dumps({"name": name, "ratios": BENCHES[name]()}))


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHES:
        command.fail(f"say which: python -m t1jax.bench {'|'.join(BENCHES)}")
    name = sys.argv.pop(1)
    command.run(lambda: main(name))
