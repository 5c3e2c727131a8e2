"""What the client checks of a server's replies, by hand and against a server that lies."""

import asyncio
import base64
import dataclasses

import numpy as np
import pytest
from aiohttp import web

from t1jax.rollout.sglang import (
    Engine,
    EngineModel,
    Settings,
    check_stream,
    read_experts,
    update_body,
)
from t1jax.types import SamplerError, Sampling

SIZES = {"vocab_size": 50, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}
MODEL = EngineModel(SIZES, context=32)
SAMPLING = Sampling(1.0, 1.0, 0)
SETTINGS = Settings((3,), reply_timeout_s=5.0, control_timeout_s=1.0)


def packed(rows: int, dtype=np.int32, value: int = 5) -> str:
    return base64.b64encode(np.full((rows, 2, 2), value, dtype).tobytes()).decode()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_experts_of_any_width(dtype):
    numbers = np.arange(7 * 4).reshape(7, 2, 2) % 8
    text = base64.b64encode(numbers.astype(dtype).tobytes()).decode()
    found, begin, width = read_experts(text, 10, 3, MODEL, (1, 2, 4))
    assert (begin, width, found.dtype) == (3, np.dtype(dtype).itemsize, np.uint8)
    np.testing.assert_array_equal(found, numbers)


def test_a_server_may_ignore_where_to_start():
    found, begin, _ = read_experts(packed(10), 10, 3, MODEL, (4,))
    assert begin == 0 and found.shape == (10, 2, 2)


@pytest.mark.parametrize(
    ("text", "end", "start", "says"),
    [
        (None, 10, 3, "no experts: start the server with --enable-return-routed-experts"),
        (packed(6), 10, 3, "96 bytes of experts for tokens .3, 10. of 4 numbers each: no reading"),
        # 8 rows of two bytes from 2 on, or ... 16 rows of one byte from 0: both are 64 bytes.
        (packed(8, np.uint16), 16, 8, "two readings fit"),
        (packed(7, value=8), 10, 3, "an expert 8 of 8"),
        (packed(7, value=-1), 10, 3, "an expert -1 of 8"),
        ("?", 10, 3, "experts that are not base64"),
        (7, 10, 3, "experts that are not base64"),
    ],
)
def test_experts_that_cannot_be_read(text, end, start, says):
    with pytest.raises(SamplerError, match=says):
        read_experts(text, end, start, MODEL, (1, 2, 4))


def test_a_width_that_is_known_leaves_one_reading():
    found, begin, _ = read_experts(packed(8, np.uint16), 16, 8, MODEL, (2,))
    assert begin == 8 and found.shape == (8, 2, 2)


def test_more_than_256_experts_take_two_bytes():
    model = dataclasses.replace(MODEL, sizes=SIZES | {"num_experts": 300})
    found, _, _ = read_experts(packed(7, value=299), 10, 3, model, (4,))
    assert found.dtype == np.uint16 and found.max() == 299


@pytest.mark.parametrize(
    ("tokens", "start", "max_new", "says"),
    [
        ([1, 50, 2], 0, 4, "token 1 is 50, outside of 50 ids"),
        ([1, 2, -1], 0, 4, "token 2 is -1, outside of 50 ids"),
        ([], 0, 4, "0 tokens and 4 new ones do not fit a context of 32"),
        ([1] * 30, 0, 4, "30 tokens and 4 new ones do not fit"),
        ([1], 0, 0, "1 tokens and 0 new ones"),
        ([1, 2], 2, 4, "experts_start=2 lies outside of 2 tokens"),
    ],
)
def test_streams_are_checked_before_they_are_sent(tokens, start, max_new, says):
    with pytest.raises(ValueError, match=says):
        check_stream(np.array(tokens, np.int32), start, max_new, MODEL)


def reply(without: str = "", **changes) -> dict:
    """Of a prompt of 4 ids with 2 rows of experts held, 3 sampled ids."""
    meta = {
        "prompt_tokens": 4,
        "output_token_logprobs": [[-0.5, 7, None], [-1.5, 8, None], [-0.25, 3, None]],
        "finish_reason": {"type": "stop"},
        "weight_version": "2",
        "weight_versions": [{"version": "2", "start": 0, "end": 3}],
        "routed_experts": packed(4),
    }
    meta |= {name: value for name, value in changes.items() if name in meta}
    meta.pop(without, None)
    return {"output_ids": changes.get("output_ids", [7, 8, 3]), "meta_info": meta}


def talk(handlers: dict, call, **calls):
    """What `call(engine)` returns, of a server whose paths are those of `handlers`."""

    async def main():
        app = web.Application()
        for path, handler in handlers.items():
            app.router.add_route("*", path, handler)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        engine = Engine(f"http://127.0.0.1:{port}", MODEL, dataclasses.replace(SETTINGS, **calls))
        try:
            return await call(engine)
        finally:
            await engine.close()
            await runner.cleanup()

    return asyncio.run(main())


def sampled(number, logprob=-1.5) -> dict:
    """`reply` with another id in its middle, or another log-prob."""
    return reply(
        output_ids=[7, number, 3],
        output_token_logprobs=[[-0.5, 7, None], [logprob, number, None], [-0.25, 3, None]],
    )


def ask(handler, version: int = 2, called: list | None = None, **calls):
    """Runs one `generate` against a server whose /generate is `handler`; returns (reply, paths called)."""
    called = [] if called is None else called

    async def log(request):
        called.append((request.path, await request.json()))
        return web.json_response({})

    def generate(engine):
        return engine.generate(np.arange(4, dtype=np.int32), 2, 8, SAMPLING, version)

    return talk({"/generate": handler, "/abort_request": log}, generate, **calls), called


def says(data, after_s: float = 0.0):
    async def handler(request):
        await asyncio.sleep(after_s)
        return web.json_response(data)

    return handler


def test_what_is_asked_and_what_comes_back():
    seen = {}

    async def handler(request):
        seen.update(await request.json())
        return web.json_response(reply())

    found, called = ask(handler)
    assert seen["input_ids"] == [0, 1, 2, 3] and seen["routed_experts_start_len"] == 2
    assert seen["return_logprob"] and seen["return_routed_experts"]
    assert seen["sampling_params"] == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 8,
        "stop_token_ids": [3],
    }
    assert found.ids.tolist() == [7, 8, 3] and found.logprobs.tolist() == [-0.5, -1.5, -0.25]
    assert found.experts.shape == (4, 2, 2) and found.experts_start == 2
    assert (found.finish, found.version, called) == ("stop", 2, [])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (reply(weight_version="1", weight_versions=[]), "a reply of weights 1, expected 2"),
        # Traps 88, 89: a request that saw two versions.
        (
            reply(weight_versions=[{"version": "1"}, {"version": "2"}]),
            "a reply of weights 1, 2, expected 2",
        ),
        # Trap 4: ids decoded and encoded again on the way.
        (reply(prompt_tokens=5), "read 5 ids of 4"),
        (reply(output_ids=[7, 8, 9]), "log-probs of other ids than it sampled"),
        (reply(finish_reason={"type": "tired"}), "unknown finish reason 'tired'"),
        (reply(routed_experts=None), "no experts"),
        (reply(output_token_logprobs=None), "a reply that cannot be read: TypeError"),
        (
            reply(without="prompt_tokens"),
            r"a reply that cannot be read: KeyError\('prompt_tokens'\)",
        ),
        # Too small a server cuts replies, which would be learnt as their end.
        (reply(finish_reason={"type": "length"}), "3 ids of 8, finished by 'length'"),
        (reply(finish_reason=None), "a reply that cannot be read: TypeError"),
        (reply(weight_versions=[2]), "a reply that cannot be read: TypeError"),
        ({}, r"a reply that cannot be read: KeyError\('meta_info'\)"),
        ([], "a reply that cannot be read"),
        ({"meta_info": []}, "a reply that cannot be read"),
        (sampled(2**40), "an id 1099511627776 of 50"),
        (sampled(2**63), "a reply that cannot be read: OverflowError"),
        (sampled(50), "an id 50 of 50"),
        (sampled(-1), "an id -1 of 50"),
        (sampled([8]), "a reply that cannot be read|log-probs of other ids"),
        (sampled(8, None), "a log-prob of nan"),
        (sampled(8, 3.0), "a log-prob of 3.0"),
        (sampled(8, 0.002), "a log-prob of 0.002"),
        (sampled(8, "low"), "a reply that cannot be read: ValueError"),
    ],
)
def test_a_reply_that_does_not_fit_is_refused(data, message):
    with pytest.raises(SamplerError, match=message):
        ask(says(data))


def test_an_error_of_the_server_is_told_and_the_request_stopped():
    async def handler(request):
        return web.Response(status=400, text="input too long")

    with pytest.raises(SamplerError, match="/generate: 400 input too long"):
        ask(handler)


def test_a_stopped_request_gives_what_it_has():
    data = reply(finish_reason={"type": "abort"})
    assert ask(says(data))[0].finish == "abort"


def test_a_request_that_was_stopped_before_it_was_read_says_so():
    data = reply(
        finish_reason={"type": "abort"},
        routed_experts=None,
        output_ids=[],
        output_token_logprobs=[],
    )
    with pytest.raises(SamplerError, match="stopped the request before it was read"):
        ask(says(data))


def test_a_log_prob_rounded_above_zero_is_zero():
    assert ask(says(sampled(8, 1e-6)))[0].logprobs.tolist() == [-0.5, 0.0, -0.25]


INFO = {"tp_size": 2, "max_req_input_len": 32}


@pytest.mark.parametrize(
    ("info", "sizes", "message"),
    [
        ({}, SIZES, "/server_info cannot be read: KeyError"),
        (INFO | {"tp_size": None}, SIZES, "/server_info cannot be read: TypeError"),
        ([], SIZES, "/server_info cannot be read: KeyError"),
        (
            INFO | {"max_req_input_len": 31},
            SIZES,
            "streams of 31 tokens, not of 32: .* 38 at least",
        ),
        (INFO, SIZES | {"num_experts": 4}, "another model: its num_experts is 4, the policy's 8"),
    ],
)
def test_a_server_that_does_not_suit_is_named(info, sizes, message):
    handlers = {"/server_info": says(info), "/text_config": says(sizes)}
    with pytest.raises(SamplerError, match=message):
        talk(handlers, lambda engine: engine.inspect())


def test_a_server_need_not_tell_its_sizes():
    async def ranks(engine):
        await engine.inspect()
        return engine.ranks

    assert talk({"/server_info": says(INFO)}, ranks) == 2


def test_weights_have_a_deadline_of_their_own(tmp_path):
    handlers = {
        "/update_weights_from_disk": says({"success": True}, after_s=0.5),
        "/model_info": says({"weight_version": "3"}),
    }
    talk(handlers, lambda engine: engine.load(tmp_path, 3, 5.0), control_timeout_s=0.2)
    with pytest.raises(SamplerError, match=r"/update_weights_from_disk: no answer in 0\.3 s"):
        talk(handlers, lambda engine: engine.load(tmp_path, 3, 0.3))


def test_each_rank_of_a_server_is_sent_the_tensors():
    seen = []

    async def handler(request):
        seen.append(await request.json())
        return web.json_response({"success": True})

    handlers = {
        "/server_info": says(INFO),
        "/begin_weight_update": says({"success": True}),
        "/update_weights_from_tensor": handler,
    }

    async def send(engine):
        await engine.inspect()
        await engine.begin_update(5.0)
        await engine.update(update_body("tensors", engine.ranks, 3), 5.0)

    talk(handlers, send)
    assert seen == [
        {
            "serialized_named_tensors": ["tensors", "tensors"],
            "weight_version": "3",
            "flush_cache": True,
        }
    ]


def test_a_late_reply_is_an_error_and_stops_the_request():
    seen, called = [], []

    async def handler(request):
        seen.append(await request.json())
        await asyncio.sleep(2)

    with pytest.raises(SamplerError, match=r"no answer in 0\.2 s"):
        ask(handler, called=called, reply_timeout_s=0.2)
    assert len(seen) == 1  # never sent twice
    assert called == [("/abort_request", {"rid": seen[0]["rid"]})]


def test_a_server_that_is_gone_is_named():
    async def call():
        engine = Engine("http://127.0.0.1:9", MODEL, SETTINGS)
        try:
            assert not await engine.healthy(0.5)
            await engine.generate(np.arange(4, dtype=np.int32), 0, 8, SAMPLING, 2)
        finally:
            await engine.close()

    with pytest.raises(SamplerError, match=r"127.0.0.1:9/generate: Client"):
        asyncio.run(call())
