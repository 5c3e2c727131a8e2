"""What breaks while a fleet serves, on real SGLang engines and in real sandboxes: every trial has one end, and no
reply is of other weights than the last ones published.

The tests share two engines and leave them as they are; each begins with a publication, which restarts the dead.
"""

import asyncio
import dataclasses
import itertools
import signal
import time

import jax
import pytest
from fakes import TOKENIZER, generated, need_sandbox
from fault_fixtures import (
    CONFIG,
    MODEL,
    NUMBERS,
    STREAM,
    group_of,
    kill,
    publish,
    refuses_to_serve,
    run,
    running,
    settles,
    until,
)
from fleet_fixtures import FLEET, Proxy, Refused, make_fleet

from t1jax.agent.chat import Chat
from t1jax.batch import make_batch
from t1jax.guard import GuardError, check_version
from t1jax.model.lm import init_policy
from t1jax.rollout.collect import CollectError, Trial, collect
from t1jax.sandbox.namespace import NamespaceSandbox
from t1jax.types import SamplerError


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    need_sandbox()
    return [task for task, _ in generated(tmp_path_factory.mktemp("tasks"))]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(params, fleet) of two engines, which may be dead."""
    params = init_policy(MODEL, jax.random.key(0))
    fleet = make_fleet(MODEL, tmp_path_factory.mktemp("fleet"), context=640, stop_ids=())
    try:
        fleet.load(params, 0)
        yield params, fleet
    finally:
        fleet.close()


@pytest.fixture
def whole(served):
    """The fleet, all of it alive and with new weights."""
    params, fleet = served
    publish(fleet, params)
    return params, fleet


@pytest.mark.engine
def test_an_engine_killed_among_replies_costs_its_trials_one_attempt(whole, tasks):
    _, fleet = whole
    victim = fleet._members[0]
    chunks, numbers, lost = run(fleet, tasks, lambda: kill(victim))
    again = {c.trial for c in chunks if c.attempt == 1}
    assert again and again <= lost < set(numbers)  # a reply may have come before
    assert all(c.attempt <= 1 for c in chunks)
    for chunk in chunks:
        chunk.check()
        assert chunk.status == "length" and chunk.reward is not None
        assert set(chunk.versions) == {fleet.version}
    assert not victim.alive and "the server ended with -9" in victim.why
    until(lambda: not group_of(victim), 10)


@pytest.mark.engine
def test_without_an_engine_the_step_ends_with_one_line(served, tasks):
    _, fleet = served
    living = [m for m in fleet._members if m.check()]
    with pytest.raises(CollectError, match=r"no engine is alive \(engine 0: the server .* -9") as e:
        run(fleet, tasks[:4], lambda: [kill(m) for m in living])
    assert "\n" not in str(e.value) and str(fleet._members[1].log) in str(e.value)


@pytest.mark.engine
def test_a_hung_engine_is_ended_and_comes_back_with_the_next_weights(whole, tasks):
    params, fleet = whole
    victim = fleet._members[1]
    old = victim.server.process.pid
    chunks, _, lost = run(fleet, tasks, lambda: (kill(victim, signal.SIGSTOP), time.monotonic()))
    lost, since = lost
    noticed = FLEET.probe_failures * (FLEET.probe_period_s + FLEET.probe_timeout_s)
    again = {c.trial for c in chunks if c.attempt == 1}
    assert again and again <= lost
    assert all(c.status == "length" and c.attempt <= 1 for c in chunks)
    assert victim.why == "2 health probes got no answer in 5 s"
    assert time.monotonic() - since < noticed + 30  # and the trials were made again
    until(lambda: not group_of(victim), 10)
    publish(fleet, params)
    assert victim.server.process.pid != old
    chunks, _, _ = run(fleet, tasks[:2])
    assert {v for c in chunks for v in c.versions} == {publish.version}


@pytest.mark.engine
def test_an_engine_that_refuses_all_requests_costs_its_trials_one_attempt(whole, tasks):
    """Its health is good, and as it refuses at once it always has the fewest trials."""
    _, fleet = whole
    victim, refused = fleet._members[0], []

    async def refuses(body, forward):
        refused.append(body)
        raise Refused(500, "no memory")

    with Proxy(victim, {"/generate": refuses}):
        chunks, _, _ = run(fleet, tasks * 2, concurrency=2 * len(tasks))
        again = sum(c.attempt for c in chunks)
        assert 0 < again == len(refused) <= len(tasks)
        assert all(c.attempt <= 1 and c.reward is not None for c in chunks)
        assert victim.alive and not settles(fleet, victim)  # the next load starts it anew
    assert settles(fleet, victim)


@pytest.mark.engine
def test_a_request_cancelled_at_once_leaves_no_placement(whole):
    """Its trial's release may come before its first step."""
    _, fleet = whole

    async def main():
        for number in itertools.islice(NUMBERS, 200):
            work = asyncio.create_task(fleet.sample(number, 0, STREAM, 0, 4))
            await asyncio.sleep(0)
            work.cancel()
            await asyncio.wait([work])
            await fleet.release(number)

    asyncio.run(main())
    until(lambda: not fleet._requests, 60)
    assert not fleet._home and not any(m.trials for m in fleet._members)


@pytest.mark.engine
def test_one_engine_that_refuses_weights_leaves_none_serving(whole):
    params, fleet = whole

    async def other_folder(body, forward):
        return await forward(body | {"model_path": "/nowhere"})

    with Proxy(fleet._members[1], {"/update_weights_from_disk": other_folder}):
        with pytest.raises(SamplerError, match=r"1 of 2 engines .* engine 1: .*refused|nowhere"):
            publish(fleet, params)
    assert refuses_to_serve(fleet)
    publish(fleet, params)


@pytest.mark.engine
def test_an_engine_that_stops_during_a_publication_leaves_none_serving(whole, monkeypatch):
    """The next load meets a stopped process, which hears no SIGTERM."""
    params, fleet = whole
    victim = fleet._members[0]
    pids = group_of(victim)

    async def stops(body, forward):
        kill(victim, signal.SIGSTOP)
        return await forward(body)

    with Proxy(victim, {"/update_weights_from_disk": stops}), monkeypatch.context() as patch:
        patch.setattr(fleet, "_config", dataclasses.replace(FLEET, load_timeout_s=3.0))
        with pytest.raises(SamplerError, match=r"1 of 2 engines .* engine 0: .* no answer in 3 s"):
            publish(fleet, params)
    assert refuses_to_serve(fleet) and fleet._members[1].alive and len(pids) > 1
    publish(fleet, params)
    assert not any(map(running, pids))


@pytest.mark.engine
def test_an_engine_killed_among_tensors_leaves_none_serving(whole, monkeypatch):
    params, fleet = whole
    new = dataclasses.replace(FLEET, transfer="tensors", bucket_bytes=20_000)
    monkeypatch.setattr(fleet, "_config", new)
    victim, seen = fleet._members[0], []

    async def dies(body, forward):
        seen.append(body)
        if len(seen) == 3:
            kill(victim)
        return await forward(body)

    with Proxy(victim, {"/update_weights_from_tensor": dies}):
        with pytest.raises(SamplerError, match=r"1 of 2 engines did not take .* engine 0: "):
            publish(fleet, params)
    assert refuses_to_serve(fleet) and fleet._members[1].alive


@pytest.mark.engine
def test_an_engine_that_says_it_has_the_weights_is_asked_for_log_probs(whole):
    """Trap 88."""
    _, fleet = whole

    async def skips(body, forward):
        return {"success": True}

    async def lies(body, forward):
        return await forward(body) | {"weight_version": str(publish.version)}

    with Proxy(fleet._members[0], {"/update_weights_from_disk": skips, "/model_info": lies}):
        with pytest.raises(SamplerError, match=r"1 of 2 engines .* engine 0: .* nats off"):
            publish(fleet, init_policy(MODEL, jax.random.key(1)))
    assert refuses_to_serve(fleet)


@pytest.mark.engine
def test_replies_that_do_not_fit_end_their_trials_as_infra(whole, tasks):
    """The first four replies of one engine, each wrong in its own way."""
    _, fleet = whole

    def short(reply):
        reply["meta_info"]["routed_experts"] = reply["meta_info"]["routed_experts"][:-64]

    def none(reply):
        reply["meta_info"]["routed_experts"] = None

    def stale(reply):
        reply["meta_info"]["weight_version"] = "older"

    def other(reply):
        reply["output_ids"][0] ^= 1

    wrongs = [short, none, stale, other]

    async def wrong(body, forward):
        change = wrongs.pop()
        reply = await forward(body)
        change(reply)
        return reply

    with Proxy(fleet._members[0], {"/generate": wrong}):
        chunks, _, _ = run(fleet, tasks, max_attempts=1, max_infra_share=1.0)
    causes = sorted(c.cause for c in chunks if c.status == "infra")
    assert [c.reward is None for c in chunks] == [c.status == "infra" for c in chunks]
    says = (
        "no reading fits",
        "the reply has no experts",
        "weights .*older",
        "log-probs of other ids",
    )
    assert len(causes) == 4 and all(c.startswith("SamplerError: ") for c in causes)
    for text in says:
        assert sum(text in cause for cause in causes) == 1 or "older" in text, causes
    assert sum("older" in cause for cause in causes) == 1


@pytest.mark.engine
def test_a_skipped_publication_is_noticed_with_the_next_batch(whole, tasks):
    """Trap 88: the replies bear the version of the weights that they are of."""
    _, fleet = whole
    chunks, _, _ = run(fleet, tasks[:2])
    batch = make_batch(chunks, CONFIG.episode.max_context, len(chunks))
    check_version(batch, publish.version)
    said = f"trial {chunks[0].trial} was sampled by weights {fleet.version}"
    with pytest.raises(GuardError, match=f"step {publish.version + 1}: {said}"):
        check_version(batch, publish.version + 1)


@pytest.mark.engine
def test_a_cancelled_collection_leaves_nothing_that_a_load_would_wait_for(whole, tasks):
    """The engines end its requests, of which each would be 450 tokens long."""
    params, fleet = whole
    episode = dataclasses.replace(CONFIG.episode, max_reply=450)
    asked, ended = [], []

    async def record(body, forward):
        if "rid" not in body:  # a probe of the publication
            return await forward(body)
        asked.append(body)
        ended.append(await forward(body))
        return ended[-1]

    async def stop():
        trials = [Trial(task, next(NUMBERS)) for task in tasks[:4]]
        config = dataclasses.replace(CONFIG, episode=episode)
        work = collect(trials, NamespaceSandbox.start, fleet, Chat(TOKENIZER), config)
        work = asyncio.create_task(work)
        while not asked:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    proxies = [Proxy(member, {"/generate": record}) for member in fleet._members]
    with proxies[0], proxies[1]:
        asyncio.run(stop())
        publish(fleet, params)  # an engine loads only when it is idle
        until(lambda: len(ended) == len(asked), 60)
    assert {reply["meta_info"]["finish_reason"]["type"] for reply in ended} == {"abort"}
    assert max(len(reply["output_ids"]) for reply in ended) < 450
    assert not fleet._home and not fleet._requests


@pytest.mark.engine
def test_requests_in_flight_fail_when_the_fleet_closes(whole):
    _, fleet = whole
    members = list(fleet._members)
    servers = [m.server for m in members]

    async def main():
        work = [fleet.sample(next(NUMBERS), 0, STREAM, 0, 600) for _ in range(4)]
        work = [asyncio.create_task(w) for w in work]
        while len(fleet._home) < 4:
            await asyncio.sleep(0.01)
        assert [len(member.trials) for member in members] == [2, 2]
        await asyncio.to_thread(fleet.close)
        return await asyncio.gather(*work, return_exceptions=True)

    for error in asyncio.run(main()):
        assert isinstance(error, SamplerError)
    assert all(s.process.poll() is not None for s in servers)
    with pytest.raises(SamplerError, match="the fleet is closed"):
        asyncio.run(fleet.sample(next(NUMBERS), 0, STREAM, 0, 4))
    fleet.close()
