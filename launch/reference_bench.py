"""The transformers side of `python -m t1jax.bench`, run by .venv-reference: answers requests, a line each.

    python launch/reference_bench.py CHECKPOINT THREADS

A request is a JSON object {"experts": ..., "task": "forward" | "backward" | "generate", ...}; the answer the
seconds it took, or {"error": ...}. "forward" and "backward": of "rows" sequences of "length" tokens, with the
log-probs of all tokens. "generate": "new" tokens for each of "rows" prompts of "length" tokens.
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

logging.set_verbosity_error()
torch.set_num_threads(int(sys.argv[2]))
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="sdpa")


def tokens(rows: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (rows, length), generator=generator)


def forward(ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def backward(ids: torch.Tensor) -> None:
    model.zero_grad(set_to_none=True)
    forward(ids).backward()


def generate(ids: torch.Tensor, new: int) -> None:
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=True,
        top_k=0,
        pad_token_id=0,
    )


for line in sys.stdin:
    request = json.loads(line)
    try:
        model.set_experts_implementation(request["experts"])
        ids = tokens(request["rows"], request["length"])
        start = time.perf_counter()
        if request["task"] == "generate":
            with torch.no_grad():
                generate(ids, request["new"])
        elif request["task"] == "forward":
            with torch.no_grad():
                forward(ids)
        else:
            backward(ids)
        answer = {"seconds": time.perf_counter() - start}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:300]}
    print(json.dumps(answer), flush=True)
