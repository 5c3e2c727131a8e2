"""What transformers computes for the cases: run by the environment of launch/requirements-reference.txt.

    python tests/reference/make.py OUT

Writes for each case OUT/FAMILY/CASE/: the checkpoint as `save_pretrained` leaves it, and reference.npz with
tokens, and for each length T: logits and experts in float32, logits in float64 under the same experts, and
the router's smallest margin at each place; for T=64 also the gradient of the mean token loss.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from cases import CASES, LENGTHS
from transformers import (
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_moe import modeling_qwen3_moe

FAMILIES = {
    "qwen3_5_moe": SimpleNamespace(
        config=Qwen3_5MoeTextConfig,
        model=Qwen3_5MoeForCausalLM,
        code=modeling_qwen3_5_moe,
        router=modeling_qwen3_5_moe.Qwen3_5MoeTopKRouter,
    ),
    "qwen3_moe": SimpleNamespace(
        config=Qwen3MoeConfig,
        model=Qwen3MoeForCausalLM,
        code=modeling_qwen3_moe,
        router=modeling_qwen3_moe.Qwen3MoeTopKRouter,
    ),
}
GRADIENT_LENGTH = 64


class Float64Torch:
    """The torch module, in which every float32 is a float64."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


class Routes:
    """Records what the routers choose, or makes them choose what was recorded."""

    def __init__(self, model, router):
        self.routers = [m for m in model.modules() if isinstance(m, router)]
        self.forced, self.experts, self.margins = None, {}, {}
        for layer, module in enumerate(self.routers):
            module.register_forward_hook(lambda m, i, out, layer=layer: self.hook(m, layer, out))

    def hook(self, module, layer, out):
        logits, _, experts = out
        p = torch.softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
        ranked = p.sort(-1, descending=True).values
        k = module.top_k
        if k < p.shape[-1]:
            self.margins[layer] = (ranked[:, k - 1] - ranked[:, k]).detach().numpy()
        self.experts[layer] = experts.numpy()
        if self.forced is None:
            return None
        experts = torch.from_numpy(self.forced[layer])
        scores = p.gather(-1, experts)
        if getattr(module, "norm_topk_prob", True):
            scores = scores / scores.sum(-1, keepdim=True)
        return logits, scores.to(logits.dtype), experts


def build(family, fields):
    torch.manual_seed(0)
    config = family.config(**fields)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = family.model(config).eval()
    with torch.no_grad():  # nothing may sit at a value that hides it, such as a norm's 0 or 1
        for name, p in model.named_parameters():
            if "norm" in name or "dt_bias" in name or "A_log" in name:
                p.add_(0.3 * torch.randn_like(p))
            if name.endswith("mlp.gate.weight"):
                p.normal_(std=0.3)
    return model


def in_float64(family, model, fields, tokens, forced):
    """Logits of the same weights, every float32 of the model's code replaced."""
    plain, code_torch = torch.Tensor.float, family.code.torch
    torch.Tensor.float, family.code.torch = torch.Tensor.double, Float64Torch()
    try:
        wide = build(family, fields).double()
        wide.load_state_dict(model.state_dict())
        routes = Routes(wide, family.router)
        routes.forced = forced
        with torch.no_grad():
            return wide(tokens).logits.numpy()
    finally:
        torch.Tensor.float, family.code.torch = plain, code_torch


def write(out: Path, family, fields) -> None:
    model = build(family, fields)
    model.save_pretrained(out)
    routes = Routes(model, family.router)
    tokens = torch.randint(fields["vocab_size"], (1, max(LENGTHS)))
    arrays = {"tokens": tokens.numpy()}
    for T in LENGTHS:
        with torch.no_grad():
            arrays[f"logits_{T}"] = model(tokens[:, :T]).logits.numpy()
        layers = range(len(routes.routers))
        experts = [routes.experts[i] for i in layers]
        arrays[f"experts_{T}"] = np.stack(experts, 1)  # [T, L, K]
        if routes.margins:
            arrays[f"margin_{T}"] = np.stack([routes.margins[i] for i in layers], 1)
        arrays[f"exact_{T}"] = in_float64(family, model, fields, tokens[:, :T], experts)
    T = GRADIENT_LENGTH
    logits = model(tokens[:, :T]).logits[0, :-1]
    torch.nn.functional.cross_entropy(logits, tokens[0, 1:T]).backward()
    for name, p in model.named_parameters():
        arrays[f"gradient/{name}"] = p.grad.numpy()
    np.savez(out / "reference.npz", **arrays)


if __name__ == "__main__":
    torch.set_num_threads(2)
    for family, cases in CASES.items():
        for name, fields in cases.items():
            folder = Path(sys.argv[1]) / family / name
            folder.mkdir(parents=True, exist_ok=True)
            write(folder, FAMILIES[family], fields)
            print(f"{family}/{name}", flush=True)
