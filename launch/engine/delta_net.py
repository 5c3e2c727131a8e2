"""What SGLang 0.5.23 needs of `sgl_kernel` for Qwen3.5 on a CPU, in plain torch: exact, not fast.

Names and arguments are SGLang's. Dims: T tokens of all sequences together, R requests, H value heads, K key
dim, V value dim, W taps of the convolution. State pools are updated in place; slot -1 is padding.
"""

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F


def causal_conv1d_fn_cpu(
    x,
    weight,
    bias,
    activation=None,
    conv_states=None,
    has_initial_state=None,
    cache_indices=None,
    query_start_loc=None,
    **_,
) -> Tensor:
    """Prefill: x [channels, T] of several sequences, weight [channels, W], conv_states [slots, channels, W-1]."""
    taps, starts = weight.shape[1], query_start_loc.tolist()
    y = torch.empty_like(x)
    for i, (start, end) in enumerate(itertools.pairwise(starts)):
        slot = int(cache_indices[i])
        if slot < 0 or end <= start:
            continue
        before = conv_states[slot] if has_initial_state[i] else torch.zeros_like(conv_states[slot])
        window = torch.cat([before.to(x.dtype), x[:, start:end]], 1)
        kernel = weight.float()[:, None]
        out = F.conv1d(window.float()[None], kernel, _float(bias), groups=len(x))[0]
        y[:, start:end] = _activate(out, activation).to(x.dtype)
        conv_states[slot] = window[:, -(taps - 1) :].to(conv_states.dtype)
    return y


def causal_conv1d_update_cpu(
    x, conv_states, weight, bias=None, activation=None, conv_state_indices=None, **_
) -> Tensor:
    """Decode: x [R, channels]."""
    slots, real = _slots(conv_state_indices)
    window = torch.cat([conv_states[slots].to(x.dtype), x[:, :, None]], 2)
    y = (window.float() * weight.float()).sum(-1)
    if bias is not None:
        y = y + bias.float()
    conv_states[slots[real]] = window[real][:, :, 1:].to(conv_states.dtype)
    return _activate(y, activation).to(x.dtype)


def fused_gdn_gating_cpu(A_log, a, b, dt_bias) -> tuple[Tensor, Tensor]:
    """g and beta, [1, T, H]."""
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return g[None], torch.sigmoid(b.float())[None]


def chunk_gated_delta_rule_cpu(
    q,
    k,
    v,
    g,
    beta,
    initial_state,
    cu_seqlens,
    use_qk_l2norm_in_kernel=True,
    initial_state_indices=None,
    **_,
):
    """Prefill, token by token: q and k [1, T, key heads, K], v [1, T, H, V], initial_state [slots, H, V, K]."""
    q, k = _heads(q[0], k[0], v.shape[2], use_qk_l2norm_in_kernel)
    values, g, beta = v[0].float(), g[0].float(), beta[0].float()
    out, starts = torch.zeros_like(v), cu_seqlens.tolist()
    for i, (start, end) in enumerate(itertools.pairwise(starts)):
        slot = int(initial_state_indices[i])
        if slot < 0:
            continue
        state = initial_state[slot].float()[None]
        for t in range(start, end):
            now = slice(t, t + 1)
            state, o = _step(state, q[now], k[now], values[now], g[now], beta[now])
            out[0, t] = o[0].to(out.dtype)
        initial_state[slot] = state[0].to(initial_state.dtype)
    return out, None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log,
    dt_bias,
    q,
    k,
    v,
    a,
    b,
    initial_state_source,
    initial_state_indices,
    cu_seqlens=None,
    use_qk_l2norm_in_kernel=True,
    **_,
) -> Tensor:
    """Decode: q and k [1, R, key heads, K], v [1, R, H, V]."""
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    q, k = _heads(q[0], k[0], v.shape[2], use_qk_l2norm_in_kernel)
    slots, real = _slots(initial_state_indices[: v.shape[1]])
    state = initial_state_source[slots].float()
    state, o = _step(state, q, k, v[0].float(), g[0], beta[0])
    initial_state_source[slots[real]] = state[real].to(initial_state_source.dtype)
    return o.to(v.dtype)[None]


def fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim) -> tuple[Tensor, Tensor]:
    q, k = q.reshape(-1, head_dim), k.reshape(-1, head_dim)
    return _one_plus_rms(q, q_weight, eps), _one_plus_rms(k, k_weight, eps)


def fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, q_weight, k_weight, eps, head_dim, heads):
    q, gate = q_gate.reshape(q_gate.shape[0], heads, 2 * head_dim).split(head_dim, -1)
    q, k = fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim)
    return q, k, gate.reshape(-1, head_dim).contiguous()


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz, ba, key_heads, value_heads, key_dim, value_dim
):
    values = value_heads * value_dim
    qkv, z = qkvz.split([2 * key_heads * key_dim + values, values], -1)
    b, a = ba.split([value_heads, value_heads], -1)
    z = z.reshape(-1, value_heads, value_dim)
    return qkv.contiguous(), z.contiguous(), b.contiguous(), a.contiguous()


def fused_sigmoid_mul_cpu(x, gate) -> None:
    x.mul_(torch.sigmoid(gate.reshape(x.shape).float()).to(x.dtype))


def gated_rms_norm(self, x, z=None) -> Tensor:
    """In place of layernorm_gated.RMSNorm.forward."""
    if not self.norm_before_gate or self.group_size is not None:
        raise NotImplementedError("the gated norm of this model has no version for this CPU")
    x32 = x.float()
    y = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.float()
    if z is not None:
        silu = self.activation in ("swish", "silu")
        y = y * (F.silu(z.float()) if silu else torch.sigmoid(z.float()))
    return y.to(x.dtype)


def shared_expert_gate(hidden, gate_weight, shared, out, *, do_add) -> None:
    """In place of the Triton launcher of the shared expert's gate."""
    y = torch.sigmoid(hidden.float() @ gate_weight.float())[:, None] * shared.float()
    out.copy_((out.float() + y if do_add else y).to(out.dtype))


MODULE_KERNELS = (causal_conv1d_fn_cpu, causal_conv1d_update_cpu, chunk_gated_delta_rule_cpu)
OP_KERNELS = (
    fused_gdn_gating_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
    fused_qk_gemma_rmsnorm_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
    fused_sigmoid_mul_cpu,
)


def _step(state, q, k, v, g, beta) -> tuple[Tensor, Tensor]:
    """One token of the gated delta rule: state [R, H, V, K], q and k [R, H, K], v [R, H, V], g, beta [R, H]."""
    state = state * g.exp()[..., None, None]
    error = (v - (state @ k[..., None])[..., 0]) * beta[..., None]
    state = state + error[..., None] * k[..., None, :]
    return state, (state @ q[..., None])[..., 0]


def _heads(q, k, heads: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """float32 queries, scaled, and keys of each value head."""
    q, k = q.float(), k.float()
    if normalize:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    repeats = heads // q.shape[-2]
    q = q * q.shape[-1] ** -0.5
    return q.repeat_interleave(repeats, -2), k.repeat_interleave(repeats, -2)


def _slots(indices) -> tuple[Tensor, Tensor]:
    """Slots to read, and which of them are real."""
    indices = indices.long()
    return indices.clamp_min(0), indices >= 0


def _one_plus_rms(x, weight, eps) -> Tensor:
    x32 = x.float()
    unit = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return (unit * (1.0 + weight.float())).to(x.dtype)


def _activate(x, name) -> Tensor:
    return F.silu(x) if name in ("silu", "swish") else x


def _float(x) -> Tensor | None:
    return None if x is None else x.float()
