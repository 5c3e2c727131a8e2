"""Fleets of real engines with tiny models, and a proxy that changes what they are asked and answer."""

import asyncio
import dataclasses
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import jax
import jax.numpy as jnp
import numpy as np
from aiohttp import web
from model_fixtures import CONFIG

from t1jax.model.config import DELTA_FIELDS, ModelConfig
from t1jax.model.hf import by_path, export_params, export_tensors
from t1jax.model.hf_config import hf_sizes
from t1jax.model.lm import token_logp
from t1jax.rollout.fleet import Fleet, FleetConfig
from t1jax.rollout.server import ServerConfig
from t1jax.rollout.sglang import EngineModel, Settings
from t1jax.types import Sampling

QWEN3_5 = dataclasses.replace(CONFIG, vocab_size=128, hidden_size=32, num_layers=4)
QWEN3 = dataclasses.replace(
    QWEN3_5,
    family="qwen3_moe",
    full_attention_interval=1,
    num_layers=2,
    rotary_fraction=1.0,
    **dict.fromkeys(DELTA_FIELDS, 0),
)
FLEET = FleetConfig(
    server=ServerConfig(
        ".venv-sglang/bin/python", "cpu", "float32", 16, 8192, start_timeout_s=300.0, flags=""
    ),
    engines=2,
    urls="",
    transfer="disk",
    bucket_bytes=2**20,
    reply_timeout_s=60.0,
    control_timeout_s=60.0,
    load_timeout_s=60.0,
    probe_period_s=0.5,
    probe_timeout_s=5.0,
    probe_failures=2,
    starts_per_s=1000.0,
    burst=100,
    probe_tolerance=1e-3,
)
CONTEXT, STOP = 128, 3


def logp(config, params, streams, experts=None):
    """(log-probs f32[N], experts) of each stream by the trainer, at temperature 1."""
    out = []
    score = jax.jit(token_logp, static_argnums=0)
    for i, tokens in enumerate(streams):
        n = len(tokens)
        row = np.zeros((1, CONTEXT), np.int32)
        row[0, :n] = tokens
        segments = (np.arange(CONTEXT) < n).astype(np.int32)[None]
        positions = np.arange(CONTEXT, dtype=np.int32)[None] * segments
        replay = np.full((1, CONTEXT, config.num_layers, config.experts_per_token), -1, np.int32)
        if experts is not None:
            replay[0, : n - 1] = experts[i]
        found, _, used = score(
            config, params, row, positions, segments, jnp.asarray(replay), np.ones(1, np.float32)
        )
        out.append((np.asarray(found)[0, :n], np.asarray(used)[0, : n - 1]))
    return out


def make_fleet(
    config: ModelConfig,
    folder: Path,
    context: int = CONTEXT,
    stop_ids: tuple[int, ...] = (STOP,),
    fleet: FleetConfig = FLEET,
    **changes,
) -> Fleet:
    """`changes`: arguments of Fleet."""
    arguments = dict(
        config=fleet,
        model=EngineModel(hf_sizes(config), context),
        settings=Settings(stop_ids, fleet.reply_timeout_s, fleet.control_timeout_s),
        sampling=Sampling(1.0, 1.0, 0),
        export=lambda params, out: export_params(by_path(params), config, out),
        tensors=lambda params: export_tensors(by_path(params), config),
        probe=lambda params, tokens: logp(config, params, [tokens])[0][0][1:],
        folder=folder,
    )
    return Fleet(**arguments | changes)


Forward = Callable[[dict | None], Awaitable[dict]]  # asks the engine
Change = Callable[[dict | None, Forward], Awaitable[dict]]


class Proxy:
    """Stands between one member's client and its engine, within `with`. `on[path]` answers in its stead."""

    def __init__(self, member, on: dict[str, Change]):
        self._engine, self._on, self._loop = member.engine, on, asyncio.new_event_loop()

    def __enter__(self):
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._target = self._engine.url
        self._engine.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(self, *_):
        self._engine.url = self._target
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> str:
        self._session = aiohttp.ClientSession()
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _handle(self, request: web.Request) -> web.Response:
        data = await request.read()
        change = self._on.get(request.path)
        if not change:
            status, text = await self._ask(request, data)
            return web.Response(status=status, text=text)

        async def forward(body):
            status, text = await self._ask(request, json.dumps(body).encode() if body else None)
            if status != 200:
                raise Refused(status, text)
            return json.loads(text)

        try:
            return web.json_response(await change(json.loads(data) if data else None, forward))
        except Refused as refused:
            return web.Response(status=refused.args[0], text=refused.args[1])

    async def _ask(self, request: web.Request, data: bytes | None) -> tuple[int, str]:
        url, headers = self._target + request.path_qs, {"Content-Type": "application/json"}
        async with self._session.request(request.method, url, data=data, headers=headers) as answer:
            return answer.status, await answer.text()


class Refused(Exception):
    """What a change raises to refuse: status, text."""
