"""What breaks while a fleet serves, on real SGLang engines and in real sandboxes: every trial has one end, and no
reply is of other weights than the last ones published.

The tests share two engines and leave them as they are; each begins with a publication, which restarts the dead.
"""

import asyncio
import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from fakes import TOKENIZER, generated, need_sandbox
from fleet_fixtures import FLEET, QWEN3, Proxy, make_fleet

from t1jax.agent.chat import Chat
from t1jax.agent.episode import EpisodeConfig
from t1jax.batch import make_batch
from t1jax.guard import GuardError, check_version
from t1jax.model.lm import init_policy
from t1jax.rollout.collect import CollectConfig, CollectError, Trial, collect
from t1jax.sandbox.namespace import NamespaceSandbox
from t1jax.types import SamplerError

MODEL = dataclasses.replace(QWEN3, vocab_size=512)
CONFIG = CollectConfig(
    episode=EpisodeConfig(
        protocol="bash",
        history="tokens",
        max_turns=2,
        max_context=640,
        max_reply=256,  # seconds; without stop ids each reply is that long, and the only one
        command_timeout_s=5.0,
        agent_timeout_s=60.0,
        max_output_bytes=1000,
    ),
    temperature=1.0,
    reward_kind="dense",
    reward_scale=20.0,
    concurrency=8,
    max_attempts=3,
    max_infra_share=0.0,
)
NUMBERS = itertools.count(100)
ONE = dataclasses.replace(FLEET, engines=1)
STREAM = np.arange(4, 20, dtype=np.int32)


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


def publish(fleet, params) -> None:
    publish.version += 1
    fleet.load(params, publish.version)
    assert fleet.version == publish.version and all(m.check() for m in fleet._members)


publish.version = 0


def refuses_to_serve(fleet) -> bool:
    with pytest.raises(SamplerError, match="the fleet has no weights"):
        asyncio.run(fleet.sample(next(NUMBERS), 0, STREAM, 0, 4))
    return fleet.version == -1


def run(fleet, tasks, fault=lambda: None, **changes):
    """All `tasks` at once, `fault()` while every reply is under way: (chunks, trial numbers, what fault gave)."""
    trials = [Trial(task, next(NUMBERS)) for task in tasks]
    sandboxes, ended = [], []

    async def start(task, max_output):
        sandboxes.append(await NamespaceSandbox.start(task, max_output))
        return sandboxes[-1]

    async def main():
        config = dataclasses.replace(CONFIG, **changes)
        work = collect(trials, start, fleet, Chat(TOKENIZER), config, ended.append)
        async with asyncio.TaskGroup() as group:
            done = group.create_task(work)
            while len(fleet._requests) < len(trials):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)
            found = fault()
        return done.result(), found

    try:
        chunks, found = asyncio.run(main())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    finally:
        assert not any(map(running, [s.pid for s in sandboxes])), "a sandbox outlived its trial"
    numbers = [trial.number for trial in trials]
    assert [c.trial for c in chunks] == numbers
    assert sorted(c.trial for each in ended for c in each) == numbers
    assert not fleet._home and not fleet._requests
    return chunks, numbers, found


def running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def group_of(member) -> list[int]:
    """Processes of the engine that run, whoever their parent is now."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(group) == member.server.process.pid and state != "Z":
            found.append(int(path.parent.name))
    return found


def until(condition, seconds: float) -> float:
    """Seconds that it took to come true."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() < started + seconds, "it did not come true in time"
        time.sleep(0.05)
    return time.monotonic() - started


def kill(member, sign=signal.SIGKILL) -> set[int]:
    """Signals the whole engine; returns the trials that it served."""
    lost = set(member.trials)
    os.killpg(member.server.process.pid, sign)
    return lost


@pytest.mark.engine
def test_an_engine_killed_among_replies_costs_its_trials_one_attempt(whole, tasks):
    _, fleet = whole
    victim = fleet._members[0]
    chunks, numbers, lost = run(fleet, tasks, lambda: kill(victim))
    assert len(lost) == len(numbers) / 2
    assert {c.trial for c in chunks if c.attempt == 1} == lost
    assert all(c.attempt == 0 for c in chunks if c.trial not in lost)
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
    assert lost and {c.trial for c in chunks if c.attempt == 1} == lost
    assert all(c.status == "length" and c.attempt <= 1 for c in chunks)
    assert victim.why == "2 health probes got no answer in 5 s"
    assert time.monotonic() - since < noticed + 30  # and the trials were made again
    until(lambda: not group_of(victim), 10)
    publish(fleet, params)
    assert victim.server.process.pid != old
    chunks, _, _ = run(fleet, tasks[:2])
    assert {v for c in chunks for v in c.versions} == {publish.version}


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

    short = dataclasses.replace(fleet._settings, control_timeout_s=3.0)
    monkeypatch.setattr(victim.engine, "_settings", short)
    with Proxy(victim, {"/update_weights_from_disk": stops}):
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
    params, fleet = whole
    reply = dataclasses.replace(CONFIG.episode, max_reply=450)

    async def stop():
        trials = [Trial(task, next(NUMBERS)) for task in tasks[:4]]
        config = dataclasses.replace(CONFIG, episode=reply)
        work = collect(trials, NamespaceSandbox.start, fleet, Chat(TOKENIZER), config)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await work

    asyncio.run(stop())
    started = time.monotonic()
    publish(fleet, params)  # an engine loads only when it is idle
    assert time.monotonic() - started < 2.5
    assert not fleet._home and not fleet._requests


@pytest.mark.engine
def test_requests_in_flight_fail_when_the_fleet_closes(whole):
    _, fleet = whole
    members = list(fleet._members)
    servers = [m.server for m in members]

    async def main():
        work = [fleet.sample(next(NUMBERS), 0, STREAM, 0, 600) for _ in range(4)]
        work = [asyncio.create_task(w) for w in work]
        while len(fleet._requests) < 4:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(fleet.close)
        return await asyncio.gather(*work, return_exceptions=True)

    for error in asyncio.run(main()):
        assert isinstance(error, SamplerError)
    assert all(s.process.poll() is not None for s in servers)
    with pytest.raises(SamplerError, match="the fleet is closed"):
        asyncio.run(fleet.sample(next(NUMBERS), 0, STREAM, 0, 4))
    fleet.close()


@pytest.fixture
def unstarted(tmp_path):
    """A function that makes a fleet of one engine and closes it at the end."""
    fleets = []

    def make(fleet=ONE, **changes):
        fleets.append(make_fleet(MODEL, tmp_path / "engines", fleet=fleet, **changes))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()


@pytest.fixture(scope="module")
def params():
    return init_policy(MODEL, jax.random.key(0))


@pytest.mark.engine
def test_an_engine_killed_while_it_starts_is_named_with_its_log(unstarted, params):
    fleet = unstarted()
    member = fleet._members[0]

    def killer():
        until(lambda: member.server, 60)
        time.sleep(1)
        kill(member)

    thread = threading.Thread(target=killer)
    thread.start()
    with pytest.raises(SamplerError, match=r"engine 0: the server ended with -9: .*engine-0.log"):
        fleet.load(params, 1)
    thread.join()
    assert fleet.version == -1 and not group_of(member)


@pytest.mark.engine
def test_an_engine_that_is_not_ready_in_time_is_named_with_its_log(unstarted, params):
    server = dataclasses.replace(FLEET.server, start_timeout_s=2.0)
    fleet = unstarted(dataclasses.replace(ONE, server=server))
    with pytest.raises(SamplerError, match=r"engine 0: no server after 2 s: .*engine-0.log"):
        fleet.load(params, 1)
    until(lambda: not group_of(fleet._members[0]), 10)


@pytest.mark.engine
def test_why_a_server_did_not_start_is_read_from_its_own_part_of_the_log(unstarted, params):
    server = dataclasses.replace(FLEET.server, flags="--no-such-flag")
    fleet = unstarted(dataclasses.replace(ONE, server=server))
    log = fleet._members[0].log
    log.write_text("OldError: of an earlier server\n")
    with pytest.raises(SamplerError, match=r"engine 0: the server ended with 2: ") as caught:
        fleet.load(params, 1)
    assert "OldError" not in str(caught.value) and "no-such-flag" in str(caught.value)


def test_a_full_disk_is_told(tmp_path):
    code = """if True:
        import jax, sys
        from fleet_fixtures import QWEN3, make_fleet
        from t1jax.model.lm import init_policy
        from t1jax.types import SamplerError
        fleet = make_fleet(QWEN3, sys.argv[1])
        try:
            fleet.load(init_policy(QWEN3, jax.random.key(0)), 3)
        except SamplerError as error:
            print(fleet.version, error)
        finally:
            fleet.close()"""
    script = 'mount -t tmpfs -o size=64k none "$1" && "$2" -c "$3" "$1"'
    namespaces = "-m" if os.geteuid() == 0 else "-rm"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        ["unshare", namespaces, "sh", "-c", script, "", tmp_path, sys.executable, code],
        env=os.environ | {"PYTHONPATH": f"{root}:{root / 'tests'}", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    said = f"-1 the weights cannot be written to {tmp_path}/weights-3: No space left on device"
    assert done.stdout.strip() == said


def test_a_folder_that_cannot_be_written_to_is_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SamplerError, match=r"the engines' folder .*file/engines cannot be written"):
        make_fleet(MODEL, tmp_path / "file" / "engines")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_has_died(unstarted, params):
    entered = threading.Event()

    def slow(params, tokens):
        entered.set()
        time.sleep(1)
        return np.zeros(len(tokens) - 1, np.float32)

    fleet = unstarted(probe=slow)
    errors = []

    def load():
        try:
            fleet.load(params, 1)
        except SamplerError as error:
            errors.append(str(error))

    thread = threading.Thread(target=load)
    thread.start()
    assert entered.wait(60)
    fleet._loop.call_soon_threadsafe(sys.exit)
    thread.join(30)
    assert errors == ["the fleet is closed"]
    with pytest.raises(SamplerError, match="the fleet is closed"):
        asyncio.run(fleet.sample(1, 0, STREAM, 0, 4))
