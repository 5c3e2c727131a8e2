"""Which part of which parameter each tensor of a Hugging Face checkpoint is.

A parameter of a layer is stacked over the blocks of layers: layer i is entry i // interval of the leaf
under "layer_{i % interval}". Linear maps are stored [out, in] there and [in, out] here.
"""

from typing import Literal, NamedTuple

import numpy as np

from t1jax.model.config import ModelConfig

# Tensors of a checkpoint that the text model has no use for: the vision tower and the MTP head.
SKIPPED = ("model.visual.", "visual.", "mtp.", "model.mtp.")


class Place(NamedTuple):
    """Where a tensor belongs: leaf[index], of whose last axis `part` of `parts` equal ones.

    leaf: the path below {"params": ...}, joined by "/". layout: how a tensor's axes relate to the leaf's.
    """

    leaf: str
    index: tuple[int, ...] = ()
    layout: Literal["same", "linear", "conv"] = "same"
    part: int = 0
    parts: int = 1


def tensors(config: ModelConfig) -> dict[str, Place]:
    """Every tensor of a checkpoint as this project writes it, in the order of the layers."""
    fused = config.family == "qwen3_5_moe"
    root = "model.language_model." if fused else "model."
    places = {f"{root}embed_tokens.weight": Place("trunk/embed")}
    for layer in range(config.num_layers):
        forms = _experts_fused(config, layer) if fused else _experts_apart(config, layer)
        for name, place in (_layer(config, layer) | forms).items():
            places[f"{root}layers.{layer}.{name}"] = place
    places[f"{root}norm.weight"] = Place("trunk/norm/scale")
    if not config.tie_embeddings:
        places["lm_head.weight"] = Place("head", layout="linear")
    return places


def accepted(config: ModelConfig) -> dict[str, Place]:
    """Every tensor that may be read, without the prefix: see `bare_name`."""
    places = {bare_name(name): place for name, place in tensors(config).items()}
    for layer in range(config.num_layers):
        for forms in (_experts_fused(config, layer), _experts_apart(config, layer)):
            places |= {f"layers.{layer}.{name}": place for name, place in forms.items()}
    return places


def bare_name(name: str) -> str:
    """A tensor's name without the prefix, which differs between checkpoints."""
    return name.removeprefix("model.").removeprefix("language_model.").removeprefix("model.")


def text_name(name: str) -> str:
    """The name in a checkpoint of the text model alone: engines skip others without a word."""
    return name.replace("model.language_model.", "model.")


def to_leaf(place: Place, tensor: np.ndarray) -> np.ndarray:
    """A tensor with its axes in the leaf's order."""
    if place.layout == "conv":
        return tensor[:, 0].T
    return np.swapaxes(tensor, -1, -2) if place.layout == "linear" else tensor


def from_leaf(place: Place, value: np.ndarray) -> np.ndarray:
    """The inverse of `to_leaf`, after `part_of`."""
    if place.layout == "conv":
        return value.T[:, None]
    return np.swapaxes(value, -1, -2) if place.layout == "linear" else value


def part_of(place: Place, value: np.ndarray) -> np.ndarray:
    """The view of leaf[index] that the tensor fills."""
    width = value.shape[-1] // place.parts
    return value[..., place.part * width : (place.part + 1) * width]


def tensor_shape(place: Place, leaf_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape the tensor must have."""
    *rest, last = leaf_shape[len(place.index) :]
    shape = (*rest, last // place.parts)
    if place.layout == "conv":
        return (shape[1], 1, shape[0])
    return (*shape[:-2], shape[-1], shape[-2]) if place.layout == "linear" else shape


def _slot(config: ModelConfig, layer: int) -> tuple[str, tuple[int]]:
    n = config.full_attention_interval
    return f"trunk/blocks/layer_{layer % n}", (layer // n,)


def _layer(config: ModelConfig, layer: int) -> dict[str, Place]:
    """All but the experts, by the name below "layers.N."."""
    leaf, index = _slot(config, layer)

    def linear(name: str) -> Place:
        return Place(f"{leaf}/{name}", index, "linear")

    def vector(name: str) -> Place:
        return Place(f"{leaf}/{name}", index)

    places = {
        "input_layernorm.weight": vector("mixer_norm/scale"),
        "post_attention_layernorm.weight": vector("moe_norm/scale"),
        "mlp.gate.weight": linear("moe/router"),
    }
    if config.shared_width:
        for part, name in enumerate(("gate_proj", "up_proj")):
            place = linear("moe/shared_gate_up/kernel")._replace(part=part, parts=2)
            places[f"mlp.shared_expert.{name}.weight"] = place
        places["mlp.shared_expert.down_proj.weight"] = linear("moe/shared_down/kernel")
        places["mlp.shared_expert_gate.weight"] = linear("moe/shared_gate/kernel")
    if (layer + 1) % config.full_attention_interval == 0:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            places[f"self_attn.{name}.weight"] = linear(f"attn/{name}/kernel")
        for name in ("q_norm", "k_norm"):
            places[f"self_attn.{name}.weight"] = vector(f"attn/{name}/scale")
    else:
        for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"):
            places[f"linear_attn.{name}.weight"] = linear(f"delta/{name}/kernel")
        places["linear_attn.conv1d.weight"] = Place(f"{leaf}/delta/conv", index, "conv")
        places["linear_attn.A_log"] = vector("delta/A_log")
        places["linear_attn.dt_bias"] = vector("delta/dt_bias")
        places["linear_attn.norm.weight"] = vector("delta/norm")
    return places


def _experts_fused(config: ModelConfig, layer: int) -> dict[str, Place]:
    leaf, index = _slot(config, layer)
    return {
        "mlp.experts.gate_up_proj": Place(f"{leaf}/moe/gate_up", index, "linear"),
        "mlp.experts.down_proj": Place(f"{leaf}/moe/down", index, "linear"),
    }


def _experts_apart(config: ModelConfig, layer: int) -> dict[str, Place]:
    leaf, index = _slot(config, layer)
    places = {}
    for expert in range(config.num_experts):
        at, one = f"mlp.experts.{expert}", (*index, expert)
        for part, name in enumerate(("gate_proj", "up_proj")):
            places[f"{at}.{name}.weight"] = Place(f"{leaf}/moe/gate_up", one, "linear", part, 2)
        places[f"{at}.down_proj.weight"] = Place(f"{leaf}/moe/down", one, "linear")
    return places
