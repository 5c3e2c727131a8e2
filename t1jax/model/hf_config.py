"""config.json of a Hugging Face checkpoint to ModelConfig and back.

Each field that changes the computation is honoured or, where this model computes something else, refused
by name; so is a field never heard of, unless it is switched off (null, false, 0 or empty).
"""

from typing import Any

from t1jax.model.config import DELTA_FIELDS, ModelConfig


class HFError(ValueError):
    """A Hugging Face checkpoint that cannot be read or written: one line naming the field or tensor."""


SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "num_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "expert_width",
    "rms_norm_eps": "rms_eps",
}
DELTA_SIZES = {
    "linear_num_key_heads": "delta_k_heads",
    "linear_num_value_heads": "delta_v_heads",
    "linear_key_head_dim": "delta_k_dim",
    "linear_value_head_dim": "delta_v_dim",
    "linear_conv_kernel_dim": "conv_width",
    "shared_expert_intermediate_size": "shared_width",
}
ALIASES = {"num_local_experts": "num_experts"}  # newer transformers' name
# The only value this model computes, and what a missing field means.
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "attn_output_gate": True,
    "output_gate_type": "swish",  # of the delta net's gated norm
    "mamba_ssm_dtype": "float32",  # of the delta net's memory
}
READ_APART = {
    *("model_type", "text_config", "norm_topk_prob", "tie_word_embeddings", "layer_types"),
    *("full_attention_interval", "rope_parameters", "rope_theta", "rope_scaling"),
    "partial_rotary_factor",
}
# Of training, generation, bookkeeping, or of the vision tower and the MTP head, which are left out.
WITHOUT_EFFECT = {
    *(
        "architectures",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "initializer_range",
        "use_cache",
    ),
    *(
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "max_position_embeddings",
        "intermediate_size",
    ),
    *("max_window_layers", "sliding_window", "output_router_logits", "router_aux_loss_coef"),
    *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id"),
    *("vision_end_token_id", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    *("language_model_only", "_name_or_path", "name_or_path"),
}


def from_hf(config: dict[str, Any]) -> ModelConfig:
    """The model that a config.json describes. Raises HFError naming the first field that is in the way."""
    kind = config.get("model_type")
    if kind not in ("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe"):
        raise HFError(f"config.json: model_type {kind!r} is not qwen3_5_moe or qwen3_moe")
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise HFError(f"config.json: text_config={text!r} is no object")
    _refuse_unknown(config)
    _refuse_unknown(text)
    family = "qwen3_moe" if kind == "qwen3_moe" else "qwen3_5_moe"
    text = {ALIASES.get(name, name): value for name, value in text.items()}
    sizes = dict(SIZES) if family == "qwen3_moe" else SIZES | DELTA_SIZES
    missing = [name for name in sizes if name not in text]
    if missing:
        raise HFError(f"config.json: {missing[0]} is missing")
    for name in sizes:
        kind = float if name == "rms_norm_eps" else int
        if not isinstance(text[name], kind) or isinstance(text[name], bool):
            raise HFError(f"config.json: {name}={text[name]!r} is no {kind.__name__}")
    fields = {field: text[name] for name, field in sizes.items()}
    if family == "qwen3_moe":
        fields |= dict.fromkeys(DELTA_FIELDS, 0)
    theta, fraction = _rope(text, family)
    norm_topk = text.get("norm_topk_prob", family == "qwen3_5_moe")
    if family == "qwen3_5_moe" and not norm_topk:
        raise HFError("config.json: norm_topk_prob=false is not supported for qwen3_5_moe")
    try:
        return ModelConfig(
            family=family,
            **fields,
            full_attention_interval=_interval(text, family),
            rope_theta=theta,
            rotary_fraction=fraction,
            norm_topk=norm_topk,
            tie_embeddings=config.get(
                "tie_word_embeddings", text.get("tie_word_embeddings", False)
            ),
        )
    except ValueError as error:
        raise HFError(f"config.json: {error}") from None


def to_hf(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """A config.json for a text-only checkpoint of the model, as transformers and engines read it."""
    c = config
    rope = {"rope_type": "default", "rope_theta": c.rope_theta}
    text = {
        "dtype": dtype,
        "tie_word_embeddings": c.tie_embeddings,
        "rope_parameters": rope,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 262144,
        **hf_sizes(c),
    }
    if c.family == "qwen3_moe":
        return text | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "rope_theta": c.rope_theta,
            "norm_topk_prob": c.norm_topk,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    rope["partial_rotary_factor"] = c.rotary_fraction
    kinds = ["linear_attention"] * (c.full_attention_interval - 1) + ["full_attention"]
    return (
        text
        | {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": "qwen3_5_moe_text",
            "partial_rotary_factor": c.rotary_fraction,
            "full_attention_interval": c.full_attention_interval,  # engines read it, transformers drops it
            "layer_types": kinds * c.num_blocks,
        }
    )


def hf_sizes(config: ModelConfig) -> dict[str, int | float]:
    """What a config.json states of the model's sizes, by name."""
    delta = DELTA_SIZES if config.family == "qwen3_5_moe" else {}
    return {name: getattr(config, field) for name, field in (SIZES | delta).items()}


def _refuse_unknown(config: dict[str, Any]) -> None:
    known = SIZES.keys() | DELTA_SIZES.keys() | ALIASES.keys() | READ_APART | WITHOUT_EFFECT
    for name, value in config.items():
        if name in FIXED:
            if value is not None and value != FIXED[name]:
                raise HFError(
                    f"config.json: {name}={value!r} is not supported, only {FIXED[name]!r} is"
                )
        elif name not in known and value:
            raise HFError(f"config.json: {name}={value!r} is unknown, its effect too")


def _rope(text: dict[str, Any], family: str) -> tuple[float, float]:
    """theta and the rotated fraction of a head, from the new or the older spelling."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    for given in (rope, text.get("rope_scaling") or {}):
        if not isinstance(given, dict):
            raise HFError(f"config.json: rope parameters {given!r} are no object")
        kind = given.get("rope_type", given.get("type", "default"))
        if kind != "default":
            raise HFError(f"config.json: rope_type {kind!r} is not supported, only 'default' is")
    theta = rope.get("rope_theta", text.get("rope_theta"))
    if theta is None:
        raise HFError("config.json: rope_theta is missing")
    if family == "qwen3_moe":
        return float(theta), 1.0
    fraction = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
    return float(theta), float(fraction)


def _interval(text: dict[str, Any], family: str) -> int:
    """Every how manieth layer is full attention."""
    layers = text["num_hidden_layers"]
    if family == "qwen3_moe":
        interval, kinds = 1, text.get("layer_types")
    elif kinds := text.get("layer_types"):
        interval = kinds.index("full_attention") + 1 if "full_attention" in kinds else layers + 1
    else:
        interval = text.get("full_attention_interval", 4)
    regular = ["linear_attention"] * (interval - 1) + ["full_attention"]
    if kinds and (layers % interval or kinds != regular * (layers // interval)):
        raise HFError(
            f"config.json: layer_types={kinds} is not supported: full attention must come at a fixed "
            "interval and end the last one"
        )
    return interval
