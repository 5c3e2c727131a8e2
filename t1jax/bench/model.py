"""Forward, and forward and backward, beside transformers.

A row of tokens a core: here each row on a CPU device of its own, as training does, there all in one batch over the
same threads.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from t1jax.bench.reference import MODEL, side_by_side
from t1jax.bench.turns import ROUNDS, best_of, seconds_of, take_turns
from t1jax.mesh import MeshConfig, make_mesh, replicate
from t1jax.model.deltanet import DeltaNet
from t1jax.model.layers import Attention, make_place
from t1jax.model.lm import logits_of, pick_logp, token_logp
from t1jax.model.moe import MoE
from t1jax.ppo import microbatch

LENGTHS = (512, 2048, 8192)


def bench() -> dict:
    """{"ratios"}: tokens a second by pass and length."""
    rows = os.cpu_count()
    mesh = make_mesh(MeshConfig(rows))
    peak, ratios = gemm_peak(), {}
    print(f"float32 GEMM peak {peak / 1e9:.0f} GFLOP/s, {rows} cores, {rows} rows of T tokens")
    print(f"{'pass':9}{'T':>6}{'t1jax tok/s':>13}{'transformers':>14}{'ratio':>7}{'of peak':>9}")
    with side_by_side() as (params, _, reference):
        for name, passes in (("forward", 1), ("backward", 3)):
            for T in LENGTHS:
                run = model_pass(params, name, T, mesh)
                ways = reference.ways(task=name, rows=rows, length=T)
                ours, theirs = take_turns([functools.partial(seconds_of, run)], ways)
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
    return {"ratios": ratios}


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
