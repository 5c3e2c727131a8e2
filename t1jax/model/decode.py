"""Generation: a cache of slots that is extended by prompts and by single tokens, and sampling.

Dims: R rows, S new tokens a row, L layers, K experts a token, V vocabulary.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from t1jax.model.config import ModelConfig
from t1jax.model.deltanet import DeltaState, zero_state
from t1jax.model.layers import AttentionState, RMSNorm, Rows, make_place
from t1jax.model.lm import Block, embed, head, logits_of, pick_logp


@flax.struct.dataclass
class Cache:
    """What has been read so far: one state a layer, each over all slots, and length i32[slots]."""

    layers: tuple[AttentionState | DeltaState, ...]
    length: Array


def init_cache(config: ModelConfig, slots: int, max_len: int) -> Cache:
    """An empty cache of `slots` rows with room for `max_len` tokens each."""
    c = config
    keys = (slots, c.num_kv_heads, c.head_dim, max_len)
    values = (slots, c.num_kv_heads, max_len, c.head_dim)
    layers = []
    for i in range(c.num_layers):
        if (i + 1) % c.full_attention_interval == 0:
            layers.append(AttentionState(jnp.zeros(keys, c.dtype), jnp.zeros(values, c.dtype)))
        else:
            layers.append(zero_state(c, slots))
    return Cache(tuple(layers), jnp.zeros(slots, jnp.int32))


def extend(
    config: ModelConfig,
    params: dict,
    cache: Cache,
    rows_R: Array | None,
    tokens_RS: Array,
    count_R: Array,
) -> tuple[Cache, Array, Array]:
    """Reads count[r] tokens (left-aligned in tokens[r]) into slot rows[r].

    rows: distinct slots, ids >= slots are padding; None = every slot in order, which copies nothing:
    use it for the decode step (S = 1). Rows with count 0 keep their state. The caller sees to it that
    length + count <= max_len, and donates the cache.
    Returns the cache, logits f32[R, V] at each row's last valid token (meaningless where count is 0),
    and the experts used i32[R, S, L, K], -1 under padding. At a fixed shape a row's results do not
    depend on the other rows, bit for bit.
    """
    c = config
    n = c.full_attention_interval
    trunk = params["params"]["trunk"]
    rows = Rows(rows_R)
    start_R = rows.read(cache.length)
    offset_1S = jnp.arange(tokens_RS.shape[1])[None]
    valid_RS = offset_1S < count_R[:, None]
    place = make_place(start_R[:, None] + offset_1S, valid_RS.astype(jnp.int32))
    x_RSD = embed(trunk["embed"], tokens_RS, valid_RS).astype(c.dtype)
    layers, experts = [], []
    for i in range(c.num_blocks):
        block = jax.tree.map(lambda p: p[i], trunk["blocks"])  # noqa: B023
        states = [_enter(state, rows, start_R) for state in cache.layers[i * n : (i + 1) * n]]
        x_RSD, (used, states) = Block(c).apply({"params": block}, x_RSD, place, None, states)
        layers += [
            _leave(old, rows, new)
            for old, new in zip(cache.layers[i * n : (i + 1) * n], states, strict=True)
        ]
        experts.append(used)
    last_R1 = jnp.maximum(count_R - 1, 0)[:, None]
    x_RD = jnp.take_along_axis(x_RSD, last_R1[..., None], axis=1)[:, 0]
    hidden_RD = RMSNorm(c).apply({"params": trunk["norm"]}, x_RD)
    logits_RV = logits_of(c, hidden_RD, head(c, params))
    length = rows.write(cache.length, start_R + count_R)
    experts_RSLK = jnp.moveaxis(jnp.concatenate(experts), 0, 2)
    return Cache(tuple(layers), length), logits_RV, experts_RSLK


def _enter(state, rows: Rows, start_R: Array):
    """A layer's state as its module takes it: attention writes into the slots, a delta net gets rows."""
    if isinstance(state, AttentionState):
        return state, rows
    fresh_R11 = (start_R == 0)[:, None, None]
    return DeltaState(
        jnp.where(fresh_R11, 0, rows.read(state.conv_BWC)),
        jnp.where(fresh_R11[..., None], 0, rows.read(state.memory_BHKV)),
    )


def _leave(old, rows: Rows, new):
    if isinstance(old, AttentionState):
        return new
    return DeltaState(*(rows.write(o, n) for o, n in zip(old, new, strict=True)))


def uniforms(seed: int | Array, trial_R: Array, turn_R: Array, position_R: Array) -> Array:
    """f32[R] in [0, 1), a pure function of (seed, trial, turn, position): independent of the batch."""

    def one(trial, turn, position):
        key = jax.random.key(seed)
        for part in (trial, turn, position):
            key = jax.random.fold_in(key, part)
        return jax.random.uniform(key)

    return jax.vmap(one)(trial_R, turn_R, position_R)


def sample(
    logits_RV: Array,
    uniform_R: Array,
    temperature_R: Array,
    top_p: float = 1.0,
    top_k: int = 0,
) -> tuple[Array, Array]:
    """Draws one id a row by inverse CDF, ids in vocabulary order.

    temperature > 0. top_p and top_k (0 = off) are static; both count after temperature. Returns ids
    i32[R] and logp f32[R], the id's log-prob under the whole distribution at that temperature: what
    `token_logp` recomputes.
    """
    scaled_RV = logits_RV.astype(jnp.float32) / temperature_R[:, None]
    p_RV = jax.nn.softmax(scaled_RV, axis=-1)
    if top_p < 1.0 or top_k:
        order_RV = jnp.argsort(p_RV, axis=-1, descending=True, stable=True)
        sorted_RV = jnp.take_along_axis(p_RV, order_RV, axis=-1)
        keep_RV = jnp.cumsum(sorted_RV, axis=-1) - sorted_RV < top_p
        if top_k:
            keep_RV &= (jnp.arange(p_RV.shape[-1]) < top_k)[None]
        rank_RV = jnp.argsort(order_RV, axis=-1)
        p_RV = jnp.where(jnp.take_along_axis(keep_RV, rank_RV, axis=-1), p_RV, 0)
    cdf_RV = jnp.cumsum(p_RV, axis=-1)
    beyond_RV = (cdf_RV > uniform_R[:, None] * cdf_RV[:, -1:]) & (p_RV > 0)
    last_R = p_RV.shape[-1] - 1 - jnp.argmax((p_RV > 0)[:, ::-1], axis=-1)
    ids_R = jnp.where(jnp.any(beyond_RV, axis=-1), jnp.argmax(beyond_RV, axis=-1), last_R)
    ids_R = ids_R.astype(jnp.int32)
    return ids_R, pick_logp(scaled_RV, ids_R)[0]
