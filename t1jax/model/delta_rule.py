"""The gated delta rule over whole rows, in chunks (WY form of Yang et al., Gated Delta Networks).

Per head: S <- exp(g) S;  S <- S + k (x) beta (v - S^T k);  o = S^T q.
Dims: B rows, T tokens, J key heads, H value heads, K key dim, V value dim, N chunks, C tokens a chunk.
Inside a chunk all arrays are [N, B, H, C, ...] in float32; t is the running sum of g. With
D[i, j] = exp(t_i - t_j), in_i = exp(t_i), out_i = exp(t_C - t_i):

    A = strict(k k^T * D)        w, u = (I + beta A)^-1 beta [in k, v]
    new = u - w S                S' = in_C S + (out k)^T new
    o = (q k^T * D) new + (in q) S

The gradient is written by hand: it keeps S between groups of chunks alone, computes the rest again, and
gets the gradient of t from sums over K and V where autodiff would go through every C x C array.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

GROUP = 4  # chunks computed at one time: many enough for large products, few enough for the cache


def delta_step(
    q_BTJK: Array, k_BTJK: Array, v_BTHV: Array, g_BTH: Array, beta_BTH: Array, memory_BHKV: Array
) -> tuple[Array, Array]:
    """The rule for one token a row (T = 1), as written at the top."""
    q, k, v, g, beta = (x[:, 0] for x in (q_BTJK, k_BTJK, v_BTHV, g_BTH, beta_BTH))
    q, k = (jnp.repeat(x, v.shape[1] // x.shape[1], axis=1) for x in (q, k))
    memory = memory_BHKV * jnp.exp(g)[..., None, None]
    error = v - jnp.sum(memory * k[..., None], axis=2)
    memory = memory + k[..., None] * (beta[..., None] * error)[..., None, :]
    return jnp.sum(memory * q[..., None], axis=2)[:, None], memory


def delta_rule(
    q_BTJK: Array,
    k_BTJK: Array,
    v_BTHV: Array,
    g_BTH: Array,
    beta_BTH: Array,
    memory_BHKV: Array,
    runs_BT: Array,
    chunk: int,
) -> tuple[Array, Array]:
    """o_BTHV and the memory after the last token; float32 throughout. A key head serves H / J value heads.

    runs_BT: tokens of different runs do not share memory; the given memory belongs to the first run.
    """
    T = q_BTJK.shape[1]
    C = min(chunk, 1 << (T - 1).bit_length())
    span = C * min(GROUP, -(-T // C))
    pad = -T % span
    inputs = (q_BTJK, k_BTJK, v_BTHV, g_BTH, beta_BTH)
    inputs = (jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2)) for x in inputs)
    runs_BT = jnp.pad(runs_BT, ((0, 0), (0, pad)), mode="edge")
    o_BTHV, memory_BHKV = _groups(C, span, *inputs, memory_BHKV, runs_BT)
    return o_BTHV[:, :T], memory_BHKV


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _groups(C: int, span: int, q, k, v, g, beta, memory, runs):
    """The rule for T a multiple of `span`, a multiple of C."""
    return _forward(C, span, q, k, v, g, beta, memory, runs)[0]


def _exact(fn):
    """Products in float32 also on devices that would round their factors: the inverse needs it."""

    @functools.wraps(fn)
    def exact(*arguments):
        with jax.default_matmul_precision("highest"):
            return fn(*arguments)

    return exact


@_exact
def _forward(C, span, q, k, v, g, beta, memory, runs):
    inputs = q, k, v, g, beta
    count = q.shape[1] // span

    def step(i, carry):
        memory, memories, o = carry
        memories = memories.at[i].set(memory)
        group = _prepare(C, span, i, inputs, runs)
        befores, new, memory = _carry_forward(group, memory)
        o_group = group.scores @ new + group.q_in @ befores
        return memory, memories, _put(o, i, _rows(o_group))

    memories = jnp.zeros((count, *memory.shape), memory.dtype)
    first = memory, memories, jnp.zeros(v.shape, jnp.float32)
    memory, memories, o = jax.lax.fori_loop(0, count, step, first)
    return (o, memory), (inputs, runs, memories, o)


@_exact
def _backward(C, span, residuals, cotangents):
    inputs, runs, memories, o = residuals
    d_o, d_memory = cotangents
    count = memories.shape[0]
    J = inputs[0].shape[2]

    def step(done, carry):
        d_memory, grads = carry
        i = count - 1 - done
        x = _prepare(C, span, i, inputs, runs)
        befores, new, _ = _carry_forward(x, memories[i])
        d_y, y = (_chunks(_take(a, i, span), C) for a in (d_o, o))

        d_direct = _t(x.scores) @ d_y  # of new, through o alone
        d_new, d_afters, d_memory = _carry_back(x, d_direct, d_y, d_memory)
        d_scores = (d_y @ _t(new)) * x.decay
        d_k_out = new @ _t(d_afters)
        d_wu = jnp.concatenate([-(d_new @ _t(befores)), d_new], axis=-1)
        # w, u = X beta kv with X = (I + beta A)^-1: d(kv) = beta X^T d(wu), dA = -d(kv) wu^T.
        d_kv = _t(x.inverse) @ d_wu
        d_beta = _row_sums(d_kv * (x.kv - x.a @ x.wu))
        d_kv *= x.beta
        d_a = (d_kv @ _t(x.wu)) * x.strict
        d_k_in, d_v = _split(x, d_kv)

        d_q = d_scores @ x.k + x.into * (d_y @ _t(befores))
        d_k = _t(d_scores) @ x.q - (d_a + _t(d_a)) @ x.k + x.into * d_k_in + x.out * d_k_out
        # Every exponent t_i - t_j adds (d x) x to t_i and takes it from t_j.
        leaving = _row_sums(d_k_out * x.k_out)
        kept = jnp.sum(d_afters * befores, axis=(-1, -2)) * x.into[..., -1, 0]
        d_t = d_y * y - d_direct * new - d_v * x.kv[..., x.k.shape[-1] :]
        d_t = _row_sums(d_t) + _row_sums(d_wu * x.wu) - leaving
        d_t = d_t.at[..., -1].add(jnp.sum(leaving, axis=-1) + kept)
        d_g = jnp.cumsum(d_t[..., ::-1], axis=-1)[..., ::-1]

        d_q, d_k = (a.reshape(*a.shape[:2], J, -1, *a.shape[3:]).sum(axis=3) for a in (d_q, d_k))
        new_grads = map(_rows, (d_q, d_k, d_v, d_g, d_beta))
        return d_memory, tuple(_put(a, i, b) for a, b in zip(grads, new_grads, strict=True))

    first = d_memory, tuple(jnp.zeros(x.shape, x.dtype) for x in inputs)
    d_memory, grads = jax.lax.fori_loop(0, count, step, first)
    return *grads, d_memory, None


_groups.defvjp(_forward, _backward)


class _Group(NamedTuple):
    """A few chunks: what the rule needs of them apart from the memory. See the equations at the top."""

    q: Array  # of each value head
    k: Array
    beta: Array  # [..., C, 1], as are into and out
    decay: Array  # D, [..., C, C]
    strict: Array  # D without its diagonal
    into: Array
    out: Array
    q_in: Array
    k_out: Array
    kv: Array  # [in k, v]
    a: Array
    inverse: Array
    wu: Array
    scores: Array


def _prepare(C: int, span: int, i: Array, inputs: tuple, runs: Array) -> _Group:
    q, k, v, g, beta = (_chunks(_take(x, i, span), C) for x in inputs)
    q, k = (jnp.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))
    beta = beta[..., None]
    before = jax.lax.dynamic_slice_in_dim(runs, jnp.maximum(i * span - 1, 0), 1, axis=1)
    runs = _chunks(_take(runs, i, span)[..., None], C)  # [N, B, 1, C]
    befores = jnp.concatenate([before[None, :, None], runs[:-1, ..., -1:]])
    same = runs[..., :, None] == runs[..., None, :]
    t = jnp.cumsum(g, axis=-1)
    decay = _exp_where(
        same & _wide(jnp.tri(C, dtype=bool), same), t[..., :, None] - t[..., None, :]
    )
    strict = jnp.where(_wide(jnp.eye(C, dtype=bool), decay), 0, decay)
    into = _exp_where(runs == befores, t)[..., None]
    out = _exp_where(runs == runs[..., -1:], t[..., -1:] - t)[..., None]
    kv = jnp.concatenate([k * into, v], axis=-1)
    a = (k @ _t(k)) * strict
    inverse = unit_lower_inverse(a * beta)
    wu = inverse @ (kv * beta)
    scores = (q @ _t(k)) * decay
    return _Group(
        q, k, beta, decay, strict, into, out, q * into, k * out, kv, a, inverse, wu, scores
    )


def _carry_forward(x: _Group, memory: Array) -> tuple[Array, Array, Array]:
    """The memory before each chunk, `new` of each, and the memory after them all."""
    (w, u), k_out = _split(x, x.wu), _t(x.k_out)
    befores, news = [], []
    for n in range(len(w)):
        befores.append(memory)
        news.append(u[n] - w[n] @ memory)
        memory = x.into[n, ..., -1:, :] * memory + k_out[n] @ news[n]
    return jnp.stack(befores), jnp.stack(news), memory


def _carry_back(x: _Group, d_direct, d_y, d_memory) -> tuple[Array, Array, Array]:
    """Gradients of `new`, of the memory after each chunk, and of the memory before them all."""
    (w, _), d_read = _split(x, x.wu), _t(x.q_in) @ d_y
    d_news, d_afters = [], []
    for n in reversed(range(len(w))):
        d_afters.append(d_memory)
        d_news.append(d_direct[n] + x.k_out[n] @ d_memory)
        d_memory = x.into[n, ..., -1:, :] * d_memory + d_read[n] - _t(w[n]) @ d_news[-1]
    return jnp.stack(d_news[::-1]), jnp.stack(d_afters[::-1]), d_memory


def unit_lower_inverse(a: Array) -> Array:
    """(I + a)^-1 for strictly lower triangular a[..., C, C], C a power of two.

    Halves of halves, then blocks of 2, 4 and 8 along the diagonal at once: as exact as forward substitution.
    """
    C = a.shape[-1]
    if C > 8:
        half = C // 2
        halves = jnp.stack([a[..., :half, :half], a[..., half:, half:]])
        first, second = unit_lower_inverse(halves)
        corner = -second @ (a[..., half:, :half] @ first)
        return jnp.block([[first, jnp.zeros_like(corner)], [corner, second]])
    x = _wide(jnp.eye(C, dtype=a.dtype), a) - _couplings(a, 1)
    for size in (2, 4):
        if size < C:
            x = x - x @ _couplings(a, size) @ x
    return x


def _couplings(a: Array, size: int) -> Array:
    """The entries of a that lead from a block of `size` into the next one, of each pair of blocks."""
    block = jnp.arange(a.shape[-1]) // size
    leads = (block[:, None] % 2 == 1) & (block[None, :] == block[:, None] - 1)
    return jnp.where(_wide(leads, a), a, 0)


def _take(x: Array, i: Array, span: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, i * span, span, axis=1)


def _put(x: Array, i: Array, new: Array) -> Array:
    new = new.astype(x.dtype)
    return jax.lax.dynamic_update_slice_in_dim(x, new, i * new.shape[1], axis=1)


def _chunks(x: Array, C: int) -> Array:
    """[B, span, heads, ...] -> [N, B, heads, C, ...]"""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, C, *x.shape[2:]), (1, 2), (0, 3))


def _rows(x: Array) -> Array:
    """[N, B, heads, C, ...] -> [B, span, heads, ...]"""
    x = jnp.moveaxis(x, (0, 3), (1, 2))
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _split(x: _Group, y: Array) -> list[Array]:
    """The parts of y that belong to keys and to values."""
    return jnp.split(y, [x.k.shape[-1]], axis=-1)


def _wide(matrix: Array, x: Array) -> Array:
    """The matrix with x's leading axes."""
    return jnp.expand_dims(matrix, range(x.ndim - 2))


def _t(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2)


def _row_sums(x: Array) -> Array:
    """Over the last axis. As a product, since XLA:CPU is slow at the sum of a long expression."""
    return (x @ _wide(jnp.ones((x.shape[-1], 1), x.dtype), x))[..., 0]


def _exp_where(mask: Array, x: Array) -> Array:
    """exp(x) under the mask, 0 elsewhere; masked before exp, so that nothing overflows."""
    return jnp.where(mask, jnp.exp(jnp.where(mask, x, 0)), 0)
