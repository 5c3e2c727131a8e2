"""One SGLang server over HTTP: exact token ids in and out, log-probs, experts, weights.

Written against SGLang 0.5.23. What the wire needs care for:
- an id outside the vocabulary ends the server, so ids are checked here before they are sent;
- `routed_experts` is base64 of integers, int32 or narrower (launch/engine/routes.py), of the tokens from
  `routed_experts_start_len` on; a server may ignore that and start at 0. Both are read from the length: the
  width from a reply that was asked from 0 on, such as every trial's first; two readings that fit are an error;
- a stopped request answers with status 200 and what it has;
- log-probs are those after temperature and before top-p.
Nothing is sent twice: a reply costs tokens, and a failed trial is made again anyway.
"""

import contextlib
import dataclasses
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import numpy as np
import orjson
import pybase64

from t1jax.types import Sampled, SamplerError, Sampling, digest

WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.int32}  # bytes an expert's number
RESERVED = 6  # tokens that a server keeps of what it holds, for each request
ROUNDING = 1e-3  # nats above 0 that a log-prob may be rounded to


@dataclasses.dataclass(frozen=True)
class EngineModel:
    """What a client must know of the served model: its `sizes` by the names of a Hugging Face config.json."""

    sizes: Mapping[str, int | float]
    context: int  # tokens of a whole stream

    @property
    def vocab_size(self) -> int:
        return self.sizes["vocab_size"]

    @property
    def layers(self) -> int:
        """All of them have experts."""
        return self.sizes["num_hidden_layers"]

    @property
    def num_experts(self) -> int:
        return self.sizes["num_experts"]

    @property
    def experts_per_token(self) -> int:
        return self.sizes["num_experts_per_tok"]

    @property
    def expert_type(self) -> type:
        return np.uint8 if self.num_experts <= 256 else np.uint16


@dataclasses.dataclass(frozen=True)
class Settings:
    """What ends a reply, and how long a call may take."""

    stop_ids: tuple[int, ...]
    reply_timeout_s: float
    control_timeout_s: float


class Engine:
    """A client of one server. All methods raise SamplerError when it is gone, late or answers nonsense."""

    def __init__(self, url: str, model: EngineModel, settings: Settings):
        self.url, self._model, self._settings = url, model, settings
        self._widths = tuple(WIDTHS)  # that the server may use, one of them once it is known
        # Requests live as long as a reply; each needs a connection of its own.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def close(self) -> None:
        await self._session.close()

    async def generate(
        self,
        tokens: np.ndarray,
        experts_start: int,
        max_new: int,
        sampling: Sampling,
        version: int,
    ) -> Sampled:
        """Continues `tokens` i32[N]; see types.Sampler.sample. The reply must come from weights `version`.

        A cancelled call stops the request on the server. Raises ValueError for ids outside the vocabulary
        or a stream longer than the context.
        """
        check_stream(tokens, experts_start, max_new, self._model)
        s, request = self._settings, uuid.uuid4().hex
        body = {
            "rid": request,
            "input_ids": tokens.tolist(),
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "max_new_tokens": max_new,
                "stop_token_ids": list(s.stop_ids),
            },
            "return_logprob": True,
            "return_routed_experts": True,
            "routed_experts_start_len": experts_start,
        }
        started = time.monotonic()
        try:
            reply = await self._call("/generate", body, s.reply_timeout_s)
        except BaseException:
            await self._abort(request)
            raise
        return self._read(
            reply, tokens, experts_start, max_new, version, time.monotonic() - started
        )

    async def inspect(self) -> None:
        """Raises SamplerError where the server holds less than a stream, or another model.

        A server that launch/engine/server.py did not start does not tell its sizes; they are not compared then.
        `ranks` tells afterwards how many processes of the server read weights.
        """
        info = await self._call("/server_info", None, self._settings.control_timeout_s)
        try:
            self.ranks, held = int(info["tp_size"]), int(info["max_req_input_len"])
        except (KeyError, TypeError, ValueError) as error:
            raise SamplerError(f"{self.url}/server_info cannot be read: {error!r}") from None
        if held < self._model.context:
            raise SamplerError(
                f"{self.url} holds streams of {held} tokens, not of {self._model.context}: start it with more "
                f"max_tokens, {self._model.context + RESERVED} at least"
            )
        served = {}
        with contextlib.suppress(SamplerError):
            served = await self._call("/text_config", None, self._settings.control_timeout_s)
        for name, size in self._model.sizes.items():
            if served.get(name, size) != size:
                raise SamplerError(
                    f"{self.url} serves another model: its {name} is {served[name]}, the policy's {size}"
                )

    async def version(self) -> str:
        """The version of the weights, as the server states it."""
        info = await self._call("/model_info", None, self._settings.control_timeout_s)
        return str(info.get("weight_version"))

    async def drain(self, timeout_s: float) -> None:
        """Waits until the server has nothing to do, and empties its cache.

        An aborted request and a health probe go on for a moment; a change of weights would meet them.
        """
        await self._call(f"/flush_cache?timeout={timeout_s:g}", {}, timeout_s + 1)

    async def load(self, checkpoint: Path, version: int, timeout_s: float) -> None:
        """Reads weights from a Hugging Face folder and forgets all that was cached under the old ones."""
        body = {
            "model_path": str(checkpoint),
            "weight_version": str(version),
            "flush_cache": True,
        }
        await self._control("/update_weights_from_disk", body, timeout_s)
        await self._check_version(version)

    async def begin_update(self, timeout_s: float) -> None:
        """Opens a change of weights by `update`; until `end_update` the server must not be asked for tokens."""
        await self._control("/begin_weight_update", {}, timeout_s)

    async def update(self, body: bytes, timeout_s: float) -> None:
        """Replaces some tensors, see `update_body`, and forgets all that was cached under the old ones."""
        await self._control("/update_weights_from_tensor", body, timeout_s)

    async def end_update(self, version: int, timeout_s: float) -> None:
        await self._control("/end_weight_update", {}, timeout_s)
        await self._check_version(version)

    async def abandon_update(self) -> None:
        """Closes a change of weights that its author left open. The weights may be of two versions then."""
        with contextlib.suppress(SamplerError):  # none is open, or nobody is there
            await self._control("/end_weight_update", {}, self._settings.control_timeout_s)

    async def _control(self, path: str, body: dict | bytes, timeout_s: float) -> None:
        reply = await self._call(path, body, timeout_s)
        if not reply.get("success"):
            raise SamplerError(f"{self.url}{path}: refused: {reply.get('message')}")

    async def _check_version(self, version: int) -> None:
        if (found := await self.version()) != str(version):
            raise SamplerError(f"{self.url} has weights {found!r} after loading {version}")

    async def logprobs(self, tokens: np.ndarray) -> np.ndarray:
        """f32[N-1]: log-probs of tokens 1.. of a stream at temperature 1."""
        body = {
            "input_ids": tokens.tolist(),
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        reply = await self._call("/generate", body, self._settings.control_timeout_s)
        try:
            found = [p for p, *_ in reply["meta_info"]["input_token_logprobs"] if p is not None]
            return np.array(found, np.float32)
        except (KeyError, TypeError, ValueError) as error:
            raise SamplerError(f"{self.url}: no log-probs of the prompt ({error})") from None

    async def healthy(self, timeout_s: float) -> bool:
        try:
            await self._call("/health", None, timeout_s)
        except SamplerError:
            return False
        return True

    async def _abort(self, request: str) -> None:
        with contextlib.suppress(SamplerError):  # it is gone, and the request with it
            await self._call("/abort_request", {"rid": request}, self._settings.control_timeout_s)

    async def _call(self, path: str, body: dict | bytes | None, timeout_s: float) -> dict:
        """POST of a body, which may be JSON already, GET without one. The answer's object, {} where it has none."""
        method, data = ("GET" if body is None else "POST"), body
        if isinstance(body, dict):
            data = orjson.dumps(body)
        headers = {"Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                method, self.url + path, data=data, headers=headers, timeout=timeout
            ) as answer:
                text = await answer.read()
                if answer.status != 200:
                    says = text[:300].decode(errors="replace")
                    raise SamplerError(f"{self.url}{path}: {answer.status} {says}")
        except TimeoutError:
            raise SamplerError(f"{self.url}{path}: no answer in {timeout_s:g} s") from None
        except aiohttp.ClientError as error:
            raise SamplerError(f"{self.url}{path}: {type(error).__name__}: {error}") from None
        try:
            found = orjson.loads(text)
        except ValueError:
            found = {}
        return found if isinstance(found, dict) else {}

    def _read(
        self, reply: dict, tokens, start: int, max_new: int, version: int, seconds
    ) -> Sampled:
        """Checks a reply of /generate against what was asked."""
        prompt = len(tokens)
        try:
            meta = reply["meta_info"]
            ids = np.array(reply["output_ids"], np.int64)
            chosen = [(p, i) for p, i, *_ in meta["output_token_logprobs"]]
            logprobs = np.array([p for p, _ in chosen], np.float32)
            finish, read = meta["finish_reason"]["type"], meta["prompt_tokens"]
            versions = {str(v["version"]) for v in meta.get("weight_versions") or ()}
            versions |= {str(meta["weight_version"])}
            text = meta.get("routed_experts")
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise SamplerError(f"{self.url}: a reply that cannot be read: {error!r}") from None
        if versions != {str(version)}:
            raise SamplerError(
                f"{self.url}: a reply of weights {', '.join(sorted(versions))}, expected {version}"
            )
        if read != prompt:
            raise SamplerError(f"{self.url}: read {read} ids of {prompt}")
        if [i for _, i in chosen] != ids.tolist() or ids.shape != logprobs.shape:
            raise SamplerError(f"{self.url}: log-probs of other ids than it sampled")
        if (outside := ids[(ids < 0) | (ids >= self._model.vocab_size)]).size:
            raise SamplerError(f"{self.url}: an id {outside[0]} of {self._model.vocab_size}")
        if (wrong := logprobs[~(np.isfinite(logprobs) & (logprobs <= ROUNDING))]).size:
            raise SamplerError(f"{self.url}: a log-prob of {wrong[0]}")
        if finish not in ("stop", "length", "abort"):
            raise SamplerError(f"{self.url}: unknown finish reason {finish!r}")
        if len(ids) > max_new or (finish == "length" and len(ids) < max_new):
            raise SamplerError(f"{self.url}: {len(ids)} ids of {max_new}, finished by {finish!r}")
        if finish == "abort" and text is None:
            raise SamplerError(f"{self.url}: the server stopped the request before it was read")
        ids = ids.astype(np.int32)
        experts, begin, width = read_experts(
            text, prompt + len(ids) - 1, start, self._model, self._widths
        )
        if start == 0 and len(experts):
            self._widths = (width,)
        return Sampled(
            ids=ids,
            logprobs=np.minimum(logprobs, np.float32(0)),
            experts=experts,
            experts_start=begin,
            finish=finish,
            version=version,
            seconds=seconds,
            digest=digest(ids),
        )


def update_body(payload: str, ranks: int, version: int) -> bytes:
    """What `Engine.update` sends of tensors.pack's payload: each rank of a server reads one of its own."""
    return orjson.dumps(
        {
            "serialized_named_tensors": [payload] * ranks,
            "weight_version": str(version),
            "flush_cache": True,
        }
    )


def check_stream(tokens: np.ndarray, experts_start: int, max_new: int, model: EngineModel) -> None:
    """Raises ValueError for a stream that the engine cannot continue."""
    outside = np.flatnonzero((tokens < 0) | (tokens >= model.vocab_size))
    if len(outside):
        at = outside[0]
        raise ValueError(f"token {at} is {tokens[at]}, outside of {model.vocab_size} ids")
    if not len(tokens) or max_new < 1 or len(tokens) + max_new > model.context:
        raise ValueError(
            f"{len(tokens)} tokens and {max_new} new ones do not fit a context of {model.context}"
        )
    if not 0 <= experts_start < len(tokens):
        raise ValueError(f"experts_start={experts_start} lies outside of {len(tokens)} tokens")


def read_experts(
    text: str | None, end: int, start: int, model: EngineModel, widths: tuple[int, ...]
) -> tuple[np.ndarray, int, int]:
    """u8|u16[rows, L, K] of tokens [begin, end), `begin`, and the width in bytes, one of `widths`.

    `begin` is `start`, or 0 if the server ignored that.

    Raises SamplerError where the bytes fit no reading, or two, or name an expert that does not exist.
    """
    if text is None:
        raise SamplerError(
            "the reply has no experts: start the server with --enable-return-routed-experts"
        )
    try:
        data = pybase64.b64decode(text, validate=True)  # thirty times as fast as without
    except (TypeError, ValueError) as error:
        raise SamplerError(f"experts that are not base64: {error}") from None
    row = model.layers * model.experts_per_token
    if end == start and not data:  # nothing was read since: a reply that was stopped at once
        nothing = np.zeros((0, model.layers, model.experts_per_token), model.expert_type)
        return nothing, start, widths[-1]
    readings = {
        (begin, width)
        for begin in (start, 0)
        for width in widths
        if len(data) == (end - begin) * row * width
    }
    if len(readings) != 1:
        raise SamplerError(
            f"{len(data)} bytes of experts for tokens [{start}, {end}) of {row} numbers each: "
            f"{'two readings fit' if readings else 'no reading fits'}"
        )
    ((begin, width),) = readings
    experts = np.frombuffer(data, WIDTHS[width]).reshape(-1, model.layers, model.experts_per_token)
    if experts.size and not (experts.min() >= 0 and experts.max() < model.num_experts):
        raise SamplerError(f"an expert {experts.max()} of {model.num_experts} in a reply")
    return experts.astype(model.expert_type, copy=False), begin, width
