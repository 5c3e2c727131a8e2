"""Prints how far the logits of a checkpoint are from those in reference.npz, as transformers reads it.

python tests/reference/read.py CHECKPOINT reference.npz
"""

import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

torch.set_num_threads(2)
model, info = AutoModelForCausalLM.from_pretrained(
    sys.argv[1],
    attn_implementation="eager",
    experts_implementation="eager",
    output_loading_info=True,
)
assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
arrays = np.load(sys.argv[2])
with torch.no_grad():
    logits = model(torch.from_numpy(arrays["tokens"][:, :65])).logits.numpy()
print(np.abs(logits - arrays["logits_65"]).max())
