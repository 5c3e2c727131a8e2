"""The policy and the value model, and what the trainer asks of them token by token.

Outputs of a model are by *position*; everything returned by `token_*` is by *token*: row t belongs to
token t. `by_token` is the only place where the two meet.
`params` are Flax variables, {"params": {...}}: PolicyLM has "trunk" and "head" (none where embeddings are
tied), ValueLM "trunk" and "value".
Dims: B rows, T tokens, D model, L layers, K experts a token, V vocabulary.
"""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from t1jax.model.config import ModelConfig
from t1jax.model.deltanet import DeltaNet
from t1jax.model.layers import Attention, Place, RMSNorm, dense_init, make_place, project
from t1jax.model.moe import MoE

# A loop over blocks stacks and slices all that the backward pass needs; so few are unrolled instead. Not
# where they are computed again: without the loop, XLA would merge both computations.
UNROLLED_BLOCKS = 4


class Out(NamedTuple):
    """hidden_BTD after the final norm; experts_BTLK i32, those used to *read* token t (-1 = padding)."""

    hidden_BTD: Array
    experts_BTLK: Array


class Layer(nn.Module):
    """x + mixer(norm(x)), then x + moe(norm(x))."""

    config: ModelConfig
    full_attention: bool

    @nn.compact
    def __call__(self, x_BTD: Array, place: Place, replay_BTK: Array | None, state=None):
        c = self.config
        mixer = Attention(c, name="attn") if self.full_attention else DeltaNet(c, name="delta")
        y_BTD, state = mixer(RMSNorm(c, name="mixer_norm")(x_BTD), place, state)
        x_BTD += y_BTD
        h_BTD = RMSNorm(c, name="moe_norm")(x_BTD)
        y_BTD, experts_BTK = MoE(c, name="moe")(h_BTD, place.valid_BT, replay_BTK)
        return x_BTD + y_BTD, experts_BTK, state


class Block(nn.Module):
    """`full_attention_interval` layers, the last of them full attention."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD: Array, place: Place, replay_nBTK: Array | None, states=None):
        """replay [n, B, T, K] for the block's n layers; returns x_BTD, (experts [n, B, T, K], states)."""
        n = self.config.full_attention_interval
        used, new_states = [], []
        for i in range(n):
            layer = Layer(self.config, full_attention=i == n - 1, name=f"layer_{i}")
            replay = None if replay_nBTK is None else replay_nBTK[i]
            x_BTD, experts_BTK, state = layer(
                x_BTD, place, replay, None if states is None else states[i]
            )
            used.append(experts_BTK)
            new_states.append(state)
        return x_BTD, (jnp.stack(used), None if states is None else tuple(new_states))


class Trunk(nn.Module):
    """Embedding, all blocks by one scan over the layer axis, final norm."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, tokens_BT: Array, positions_BT: Array, segments_BT: Array, experts_BTLK: Array | None
    ) -> Out:
        c = self.config
        B, T = tokens_BT.shape
        place = make_place(positions_BT, segments_BT)
        init = nn.initializers.truncated_normal(c.embed_std)
        table_VD = self.param("embed", init, (c.vocab_size, c.hidden_size), c.param_dtype)
        x_BTD = embed(table_VD, tokens_BT, place.valid_BT).astype(c.dtype)
        replay = None
        if experts_BTLK is not None:
            replay = jnp.moveaxis(experts_BTLK, 2, 0)
            replay = replay.reshape(c.num_blocks, c.full_attention_interval, *replay.shape[1:])
        few, block = c.num_blocks <= UNROLLED_BLOCKS, Block
        if c.remat != "none":
            policies = {
                "block": None,
                "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
            }
            block = nn.remat(Block, prevent_cse=False, policy=policies[c.remat])
        blocks = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(nn.broadcast, 0),
            length=c.num_blocks,
            unroll=c.num_blocks if few and c.remat == "none" else 1,
        )
        x_BTD, (experts, _) = blocks(c, name="blocks")(x_BTD, place, replay)
        experts_BTLK = jnp.moveaxis(experts.reshape(c.num_layers, B, T, -1), 0, 2)
        return Out(RMSNorm(c, name="norm")(x_BTD), experts_BTLK)


class PolicyLM(nn.Module):
    """tokens, positions, segments i32[B, T] (segment 0 = padding) -> Out.

    experts i32[B, T, L, K] replays recorded routes; -1 = this token routes freely; None = all do.
    The head is a parameter only: `token_logp` and decoding use it where they need logits.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, tokens_BT, positions_BT, segments_BT, experts_BTLK=None) -> Out:
        c = self.config
        if not c.tie_embeddings:
            self.param("head", dense_init, (c.hidden_size, c.vocab_size), c.param_dtype)
        return Trunk(c, name="trunk")(tokens_BT, positions_BT, segments_BT, experts_BTLK)


class ValueLM(nn.Module):
    """The same trunk under a scalar head that starts at zero; returns values f32[B, T] by position."""

    config: ModelConfig

    @nn.compact
    def __call__(self, tokens_BT, positions_BT, segments_BT) -> Array:
        c = self.config
        value_D = self.param("value", nn.initializers.zeros, (c.hidden_size,), jnp.float32)
        out = Trunk(c, name="trunk")(tokens_BT, positions_BT, segments_BT, None)
        return out.hidden_BTD.astype(jnp.float32) @ value_D


def init_policy(config: ModelConfig, key: Array) -> dict:
    """Fresh policy parameters."""
    return _init(PolicyLM(config), key)


def init_value(config: ModelConfig, key: Array, policy: dict | None = None) -> dict:
    """Fresh value parameters; with `policy`, its trunk (not copied) under the zero head."""
    params = _init(ValueLM(config), key)
    if policy is None:
        return params
    return {"params": {**params["params"], "trunk": policy["params"]["trunk"]}}


def token_logp(
    config: ModelConfig,
    params: dict,
    tokens_BT: Array,
    positions_BT: Array,
    segments_BT: Array,
    experts_BTLK: Array | None,
    temperature_B: Array,
) -> tuple[Array, Array, Array]:
    """Log-probs and entropies f32[B, T] by token, and the experts used i32[B, T, L, K].

    Row t = log p(token t | tokens before it in its segment) at the row's temperature, <= 0; 0 where
    nothing precedes it and under padding. Logits exist for `logp_chunk` tokens of each row at a time.
    """
    out = PolicyLM(config).apply(params, tokens_BT, positions_BT, segments_BT, experts_BTLK)
    hidden_BTD = by_token(out.hidden_BTD, segments_BT)
    valid_BT = has_previous(segments_BT)
    targets_BT = jnp.where(valid_BT, tokens_BT, 0)
    B, T = tokens_BT.shape
    chunk = min(config.logp_chunk, T)
    pad = -T % chunk

    def chunks(x):  # [B, T, ...] -> [n, B, chunk, ...]
        x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, -1, chunk, *x.shape[2:]), 1, 0)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(head_DV, chunk):
        hidden, target = chunk
        logits = logits_of(config, hidden, head_DV)
        return head_DV, pick_logp(logits / temperature_B[:, None, None], target)

    head_DV = head(config, params)
    _, picked = jax.lax.scan(step, head_DV, (chunks(hidden_BTD), chunks(targets_BT)))
    logp_BT, entropy_BT = (jnp.moveaxis(x, 0, 1).reshape(B, -1)[:, :T] for x in picked)
    return jnp.where(valid_BT, logp_BT, 0), jnp.where(valid_BT, entropy_BT, 0), out.experts_BTLK


def head(config: ModelConfig, params: dict) -> Array:
    """The output matrix [D, V]."""
    p = params["params"]
    return p["trunk"]["embed"].T if config.tie_embeddings else p["head"]


def logits_of(config: ModelConfig, hidden: Array, head_DV: Array) -> Array:
    """hidden @ head in the compute dtype, as float32, rounded to `logits_dtype` before."""
    return project(hidden, head_DV.astype(config.dtype), config.logits_dtype).astype(jnp.float32)


def token_values(
    config: ModelConfig, params: dict, tokens_BT: Array, positions_BT: Array, segments_BT: Array
) -> Array:
    """Values f32[B, T] by token: row t = value of the state in which token t was chosen. Routes freely."""
    values_BT = ValueLM(config).apply(params, tokens_BT, positions_BT, segments_BT)
    return by_token(values_BT, segments_BT)


def by_token(x: Array, segments_BT: Array) -> Array:
    """Moves outputs x[B, T, ...] from the position that made them to the token they speak of.

    Row t gets the output at t-1; 0 where token t is padding or the first of its segment.
    """
    shifted = jnp.pad(x[:, :-1], ((0, 0), (1, 0)) + ((0, 0),) * (x.ndim - 2))
    keep = jnp.expand_dims(has_previous(segments_BT), range(2, x.ndim))
    return jnp.where(keep, shifted, 0)


def has_previous(segments_BT: Array) -> Array:
    """bool[B, T]: token t is no padding and follows another token of its segment."""
    before_BT = jnp.pad(segments_BT[:, :-1], ((0, 0), (1, 0)))
    return (segments_BT != 0) & (segments_BT == before_BT)


def pick_logp(logits: Array, target: Array) -> tuple[Array, Array]:
    """log softmax(logits)[target] <= 0 and the entropy, over the last axis."""
    logits = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    log_sum = jnp.log(jnp.sum(jnp.exp(logits), axis=-1))
    picked = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    logp = logits - log_sum[..., None]
    return picked - log_sum, -jnp.sum(jnp.exp(logp) * logp, axis=-1)


def embed(table_VD: Array, tokens_BT: Array, valid_BT: Array) -> Array:
    """Rows of the table; 0 under padding, whatever token id stands there."""
    x_BTD = table_VD[jnp.where(valid_BT, tokens_BT, 0)]
    return jnp.where(valid_BT[..., None], x_BTD, 0)


def _init(model: nn.Module, key: Array) -> dict:
    ones = jnp.ones((1, 2), jnp.int32)
    return jax.jit(model.init)(key, ones, ones, ones)
