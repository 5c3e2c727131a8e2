"""The shape of a Qwen3.5-MoE or Qwen3-MoE text model, and the published sizes.

Qwen3.5-MoE (family "qwen3_5_moe"): gated delta nets, gated attention, a shared expert, norms that store
w - 1. Qwen3-MoE ("qwen3_moe"): plain attention in every layer, no shared expert, norms that store w.
"""

import dataclasses

REMAT = ("none", "dots", "block")  # nothing; all but matrix products; all but each block's input
DTYPES = ("float32", "bfloat16")
CHOICES = {
    "family": ("qwen3_5_moe", "qwen3_moe"),
    "remat": REMAT,
    **dict.fromkeys(("dtype", "param_dtype", "router_dtype", "logits_dtype"), DTYPES),
}
DELTA_FIELDS = (
    *("delta_k_heads", "delta_v_heads", "delta_k_dim", "delta_v_dim"),
    "shared_width",
)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and choices of one model; hashable, so that it can be a static argument of jit.

    Layer i is full attention where (i + 1) % full_attention_interval == 0, else a gated delta net.
    The dtypes: `dtype` of activations and matrix products, `param_dtype` of the weights (A_log, dt_bias and
    the delta nets' norms are float32), `router_dtype` and `logits_dtype` of those two products; softmaxes,
    norms and the delta rule's memory are always float32.
    Raises ValueError where the sizes do not fit together.
    """

    family: str = dataclasses.field(default="qwen3_5_moe", kw_only=True)
    vocab_size: int
    hidden_size: int
    num_layers: int
    full_attention_interval: int
    num_heads: int  # query heads of full attention
    num_kv_heads: int
    head_dim: int
    delta_k_heads: int
    delta_v_heads: int
    delta_k_dim: int  # per head
    delta_v_dim: int
    num_experts: int
    experts_per_token: int
    expert_width: int
    shared_width: int  # of the shared expert; 0 in Qwen3-MoE, which has none
    conv_width: int = 4
    rope_theta: float = 1e7
    rotary_fraction: float = 0.25
    rms_eps: float = 1e-6
    norm_topk: bool = True  # the weights of a token's experts are made to sum to 1
    tie_embeddings: bool = False  # the head is the embedding table
    embed_std: float = 0.02
    dtype: str = "float32"
    param_dtype: str = "float32"
    router_dtype: str = "float32"
    logits_dtype: str = "float32"
    remat: str = "none"  # what the backward pass recomputes: see REMAT
    delta_chunk: int = 32  # tokens a chunk of the delta rule: 32 on CPU, 64 elsewhere
    logp_chunk: int = 64  # tokens of a row whose logits exist at one time

    def __post_init__(self):
        may_be_zero = DELTA_FIELDS if self.family == "qwen3_moe" else ()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in (int, "int") and value < 1 and field.name not in may_be_zero:
                raise ValueError(f"{field.name}={value} must be at least 1")
            if field.name in CHOICES and value not in CHOICES[field.name]:
                known = ", ".join(CHOICES[field.name])
                raise ValueError(f"{field.name}={value!r} is not one of {known}")
        if self.family == "qwen3_moe":
            wrong = {name: getattr(self, name) for name in DELTA_FIELDS if getattr(self, name)}
            if wrong or self.full_attention_interval != 1:
                raise ValueError(
                    "qwen3_moe has full attention in every layer and no shared expert: "
                    f"full_attention_interval must be 1 and {', '.join(DELTA_FIELDS)} 0"
                )
        for whole, part in (
            ("num_layers", "full_attention_interval"),
            ("num_heads", "num_kv_heads"),
            ("delta_v_heads", "delta_k_heads"),
        ):
            if getattr(self, whole) % max(getattr(self, part), 1):
                raise ValueError(
                    f"{whole}={getattr(self, whole)} must be a multiple of "
                    f"{part}={getattr(self, part)}"
                )
        if not 0 < self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} must lie in "
                f"1..num_experts={self.num_experts}"
            )
        if self.delta_chunk & (self.delta_chunk - 1) or self.delta_chunk < 1:
            raise ValueError(f"delta_chunk={self.delta_chunk} must be a power of two")
        if self.rotary_dim % 2:
            raise ValueError(
                f"head_dim * rotary_fraction = {self.rotary_dim} must be even: it is rotated in pairs"
            )

    @property
    def num_blocks(self) -> int:
        """Blocks of `full_attention_interval` layers: what the layer scan runs over."""
        return self.num_layers // self.full_attention_interval

    @property
    def rotary_dim(self) -> int:
        """How many of a head's dims RoPE turns."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def conv_dim(self) -> int:
        """Channels of the delta net's convolution: q, k and v side by side."""
        return 2 * self.delta_k_heads * self.delta_k_dim + self.delta_v_heads * self.delta_v_dim


QWEN3_5_122B_A10B = ModelConfig(
    vocab_size=248320,
    hidden_size=3072,
    num_layers=48,
    full_attention_interval=4,
    num_heads=32,
    num_kv_heads=2,
    head_dim=256,
    delta_k_heads=16,
    delta_v_heads=64,
    delta_k_dim=128,
    delta_v_dim=128,
    num_experts=256,
    experts_per_token=8,
    expert_width=1024,
    shared_width=1024,
    dtype="bfloat16",
    remat="block",
    delta_chunk=64,
)

QWEN3_5_35B_A3B = dataclasses.replace(
    QWEN3_5_122B_A10B,
    hidden_size=2048,
    num_layers=40,
    num_heads=16,
    delta_v_heads=32,
    expert_width=512,
    shared_width=512,
)

QWEN3_30B_A3B = dataclasses.replace(
    QWEN3_5_35B_A3B,
    family="qwen3_moe",
    vocab_size=151936,
    num_layers=48,
    full_attention_interval=1,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    num_experts=128,
    expert_width=768,
    rope_theta=1e6,
    rotary_fraction=1.0,
    **dict.fromkeys(DELTA_FIELDS, 0),
)
