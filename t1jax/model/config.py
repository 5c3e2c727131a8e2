"""The shape of a Qwen3.5-MoE text model: gated delta nets, gated attention, sparse experts."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and choices of one model; hashable, so that it can be a static argument of jit.

    Layer i is full attention where (i + 1) % full_attention_interval == 0, else a gated delta net.
    Raises ValueError where the sizes do not fit together.
    """

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
    shared_width: int
    conv_width: int = 4
    rope_theta: float = 1e7
    rotary_fraction: float = 0.25
    rms_eps: float = 1e-6
    embed_std: float = 0.02
    dtype: str = "float32"  # of activations and matrix products
    param_dtype: str = "float32"
    remat: bool = False  # recompute each block of layers in the backward pass
    delta_chunk: int = 32  # tokens a chunk of the delta rule: 32 on CPU, 64 elsewhere
    logp_chunk: int = 64  # tokens of a row whose logits exist at one time

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in (int, "int") and value < 1:
                raise ValueError(f"{field.name}={value} must be at least 1")
        for whole, part in (
            ("num_layers", "full_attention_interval"),
            ("num_heads", "num_kv_heads"),
            ("delta_v_heads", "delta_k_heads"),
        ):
            if getattr(self, whole) % getattr(self, part):
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
