"""What an engine does with routed experts, without its model; a process of `python -m t1jax.bench routes`.

    python -m t1jax.bench.routes_server PORT TOKENS LAYERS TOP EXPERTS

/narrow/generate narrows rows as launch/engine/routes.py does, /int32/generate sends them as SGLang 0.5.23 does by
itself. Either gathers them by cache slot, pickles them as on the way between SGLang's processes, and answers with
base64 in JSON by the same libraries. /times tells the seconds of each part since it was last asked.
"""

import pickle
import sys
import time

import numpy as np
import orjson
import pybase64
from aiohttp import web

CHUNK = 1024  # rows that are narrowed while the cache holds them


class Server:
    """buffer: i32[slots, L, K] of a full cache; the stream lies in it in random order."""

    def __init__(self, tokens: int, layers: int, top: int, experts: int):
        rng = np.random.default_rng(0)
        self.experts = experts
        self.buffer = rng.integers(0, experts, (tokens, layers, top)).astype(np.int32)
        self.slots = rng.permutation(tokens)
        self.seconds = dict.fromkeys(("gather", "pass", "encode", "dump"), 0.0)

    async def generate(self, request: web.Request) -> web.Response:
        asked = orjson.loads(await request.read())
        end = len(asked["input_ids"])
        slots = self.slots[asked["routed_experts_start_len"] : end]
        start = time.perf_counter()
        rows = self.narrow(slots) if request.match_info["form"] == "narrow" else self.buffer[slots]
        gathered = time.perf_counter()
        rows = pickle.loads(pickle.dumps(rows, pickle.HIGHEST_PROTOCOL))
        passed = time.perf_counter()
        text = encode(rows)
        encoded = time.perf_counter()
        body = dump(text, end)
        self.count("gather", gathered - start)
        self.count("pass", passed - gathered)
        self.count("encode", encoded - passed)
        self.count("dump", time.perf_counter() - encoded)
        return web.Response(body=body, content_type="application/json")

    def narrow(self, slots: np.ndarray) -> np.ndarray:
        rows = np.empty((len(slots), *self.buffer.shape[1:]), np.uint8)
        for begin in range(0, len(slots), CHUNK):
            wide = self.buffer[slots[begin : begin + CHUNK]]
            if wide.min() < 0 or wide.max() >= self.experts:
                raise ValueError("an expert that does not exist")
            rows[begin : begin + CHUNK] = wide
        return rows

    def count(self, part: str, seconds: float) -> None:
        self.seconds[part] += seconds

    async def times(self, request: web.Request) -> web.Response:
        told, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        return web.json_response(told)


def encode(rows: np.ndarray) -> str:
    return pybase64.b64encode(rows.tobytes()).decode()


def dump(text: str, prompt: int) -> bytes:
    """A reply of one token to `prompt` tokens."""
    meta = {
        "prompt_tokens": prompt,
        "output_token_logprobs": [[-1.0, 0, None]],
        "finish_reason": {"type": "length"},
        "weight_version": "0",
        "routed_experts": text,
    }
    return orjson.dumps({"output_ids": [0], "meta_info": meta})


def main(port: int, *shape: int) -> None:
    server = Server(*shape)
    app = web.Application(client_max_size=2**24)
    app.router.add_post("/{form}/generate", server.generate)
    app.router.add_get("/times", server.times)
    web.run_app(app, host="127.0.0.1", port=port, print=lambda _: print("ready", flush=True))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
