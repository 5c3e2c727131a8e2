"""Scripted trials through the real loop, as ATIF documents and rollout details, and back; the export main."""

import asyncio
import copy
import dataclasses
import itertools
import json
import os
import time

import numpy as np
import orjson
import pytest
from audit_fixtures import finish, start
from fakes import (
    COLLECT,
    SUBMIT,
    TOKENIZER,
    ScriptedSampler,
    bash,
    generated,
    need_sandbox,
    replies,
)

from configs import tiny
from t1jax import export
from t1jax.agent.action import SYSTEM, parse
from t1jax.agent.chat import Chat
from t1jax.atif import documents, read, rollout_details, trial_result
from t1jax.atif_format import AtifError, check
from t1jax.experiment import ConfigError, read_experiment, write_config
from t1jax.rollout import store
from t1jax.rollout.collect import Trial, collect
from t1jax.sandbox.namespace import NamespaceSandbox
from t1jax.transcript import make_transcribe
from t1jax.types import SamplerError

DROPS = TOKENIZER.parent / "chat_template_drops.jinja"
MALFORMED = "I do not know."


@pytest.fixture(scope="module")
def chat():
    return Chat(TOKENIZER)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    need_sandbox()
    return generated(tmp_path_factory.mktemp("tasks"), 3)


class TextSampler(ScriptedSampler):
    """Its prompts are rendered anew each turn."""

    async def sample(self, trial, *arguments):
        self._seen.pop(trial, None)
        return await super().sample(trial, *arguments)


def play(tasks, sampler, chat, **changes):
    config = dataclasses.replace(COLLECT, episode=dataclasses.replace(COLLECT.episode, **changes))
    trials = [Trial(tasks[number % len(tasks)][0], number) for number in sorted(sampler._script)]
    return asyncio.run(collect(trials, NamespaceSandbox.start, sampler, chat, config))


@pytest.fixture(scope="module")
def said(tasks):
    """The replies of trials 0..4: two oracles, one that fumbles, one cut by turns, and one without any."""
    odd = "printf '<|im_end|>\\n<|im_start|>user\\n  caf\\303\\251 \\377\\n\\n'; false"
    return {
        0: replies(tasks[0][1]),
        1: replies(tasks[1][1]),
        2: [MALFORMED, bash(odd), bash("true"), SUBMIT],
        3: [bash(f"echo {i}") for i in range(8)],
        4: [SamplerError("gone")] * 3,
    }


@pytest.fixture(scope="module")
def recorded(tasks, said, chat):
    stored = play(tasks, ScriptedSampler(chat, said), chat)
    assert [t.trial for t in stored] == [0, 1, 2, 3, 4]
    return stored


@pytest.fixture(scope="module")
def exported(recorded, chat):
    """The document of each trial with a reply."""
    transcribe = make_transcribe(chat, "tokens")
    out = []
    for t in recorded[:4]:
        out += documents([t], transcribe([t]), "bash", "run", f"trial_{t.trial}")
    return out


def test_documents_are_atif(exported):
    for document in exported:
        check(document)
        assert orjson.loads(orjson.dumps(document)) == document


def test_what_was_said_comes_back(exported, said, tasks, chat):
    for number, document in enumerate(exported):
        transcript = read(document)
        assert (transcript.system, transcript.task) == (
            SYSTEM["bash"],
            tasks[number % 3][0].instruction,
        )
        assert [e.reply for e in transcript.exchanges] == said[number]
        assert not any(e.copied for e in transcript.exchanges)
        assert transcript.resolved == (number < 2)
    heard = [e.observation for e in read(exported[2]).exchanges]
    assert heard[0] == "expected one bash or submit block, got 0"
    assert heard[1] == "exit 1\n<|im_end|>\n<|im_start|>user\n  café \ufffd"
    assert heard[2:] == ["ok", None]  # a submit is not answered
    heard = [e.observation for e in read(exported[3]).exchanges]
    assert heard == [*map(str, range(7)), "7\n"]  # the last one was printed, but not read


def test_steps_say_what_was_done(exported, said, tasks):
    document = exported[0]
    system, user, *steps = document["steps"]
    assert (system["source"], user["source"]) == ("system", "user")
    assert [step["step_id"] for step in steps] == list(range(3, 3 + len(said[0])))
    calls = [call for step in steps for call in step["tool_calls"]]
    assert [call["function_name"] for call in calls] == ["bash"] * len(tasks[0][1]) + ["submit"]
    assert [call["arguments"] for call in calls[:-1]] == [{"command": c} for c in tasks[0][1]]
    (result,) = steps[0]["observation"]["results"]
    assert result["source_call_id"] == calls[0]["tool_call_id"] == "call_0_1"
    assert result["extra"]["exit_code"] == 0
    assert "observation" not in steps[-1] and steps[0]["model_name"] == "policy-7"
    assert document["extra"]["status"] == "submitted" and document["extra"]["resolved"] is True
    malformed = exported[2]["steps"][2]
    assert "tool_calls" not in malformed
    assert "source_call_id" not in malformed["observation"]["results"][0]


def test_ids_and_log_probs_are_the_stores(exported, recorded):
    for document, t in zip(exported, recorded, strict=False):
        metrics = [step["metrics"] for step in document["steps"][2:]]
        end = 0
        for turn, m in zip(t.turns, metrics, strict=True):
            end += len(turn.context)
            np.testing.assert_array_equal(m["prompt_token_ids"], t.tokens[:end])
            np.testing.assert_array_equal(m["completion_token_ids"], turn.sampled)
            np.testing.assert_array_equal(np.float32(m["logprobs"]), turn.logprobs)
            assert (m["prompt_tokens"], m["completion_tokens"]) == (end, len(turn.sampled))
            end += len(turn.sampled)
        final = document["final_metrics"]
        assert final["total_completion_tokens"] == t.sampled.sum()
        assert final["total_prompt_tokens"] == sum(m["prompt_tokens"] for m in metrics)
        assert final["total_steps"] == len(document["steps"])


def assert_details(chunks):
    for detail, t in zip(rollout_details(chunks), chunks, strict=True):
        turns = list(zip(detail["prompt_token_ids"], detail["completion_token_ids"], strict=True))
        np.testing.assert_array_equal(np.concatenate(turns[-1]), t.tokens)
        for (before, reply), (prompt, _) in itertools.pairwise(turns):
            assert prompt[: len(before) + len(reply)] == before + reply
        np.testing.assert_array_equal(
            np.float32(np.concatenate(detail["logprobs"])), t.logprobs[t.sampled]
        )
        rows = detail["extra"]["routed_experts"]
        np.testing.assert_array_equal(np.concatenate(rows), t.experts)
        for (prompt, reply), end in zip(turns, np.cumsum([len(r) for r in rows]), strict=True):
            assert end == len(prompt) + len(reply) - 1


def test_rollout_details_are_the_stores(recorded):
    for t in recorded[:4]:
        assert_details([t])
        result = orjson.loads(orjson.dumps(trial_result([t], "name")))
        assert result["verifier_result"] == {"rewards": {"reward": float(t.resolved)}}
        assert result["agent_result"]["metadata"]["reward"] == t.reward
    assert trial_result([recorded[4]], "name")["verifier_result"] is None


def test_a_trial_of_two_chunks_is_two_documents(tasks):
    """The template strips what a reply began with, so the second prompt opens a chunk."""
    chat = Chat(TOKENIZER, DROPS, appends=False)
    said = ["\n\n" + bash("echo '<|im_end|>'"), bash("echo two"), SUBMIT]
    chunks = play(tasks, TextSampler(chat, {0: said}), chat, history="stitched")
    assert len(chunks) == 2
    transcript = make_transcribe(chat, "stitched")(chunks)
    first, second = documents(chunks, transcript, "bash", "run", "trial")
    check(first), check(second)
    assert first["continued_trajectory_ref"] == "trial.cont-1.json"
    assert "continued_trajectory_ref" not in second
    (one,) = read(first).exchanges
    assert one.reply == said[0] and one.observation == "< |im_end|>"  # as the model read it
    assert read(second).task == read(first).task == tasks[0][0].instruction
    assert [e.reply for e in read(second).exchanges] == said
    assert [e.copied for e in read(second).exchanges] == [True, False, False]
    assert [e.observation for e in read(second).exchanges] == ["< |im_end|>", "two", None]
    assert [s.get("is_copied_context") for s in second["steps"]] == [True] * 3 + [None] * 2
    assert "metrics" not in second["steps"][2] and "metrics" in second["steps"][3]
    assert_details(chunks)


def test_a_chunk_behind_a_summary_is_a_document_of_its_own(recorded, chat):
    """As if the third turn of the last trial had been asked for a summary, and the rest went on from it."""
    t = recorded[3]
    turns = list(t.turns[:5])
    summary = dataclasses.replace(turns[2], action="summary", command=None)
    opening = chat.opening(SYSTEM["bash"], "task and summary")
    fresh = dataclasses.replace(turns[3], context=opening, join="split")
    parts = [[*turns[:2], summary], [fresh, turns[4]]]
    chunks = [dataclasses.replace(t, chunk=i, turns=tuple(p)) for i, p in enumerate(parts)]
    first, second = documents(
        chunks, make_transcribe(chat, "tokens")(chunks), "bash", "run", "trial"
    )
    check(first), check(second)
    sources = [step["source"] for step in first["steps"]]
    assert sources == ["system", "user", "agent", "agent", "user", "agent"]
    assert "observation" not in first["steps"][3] and "tool_calls" not in first["steps"][5]
    assert [e.observation for e in read(first).exchanges] == ["0", "1", "2\n"]
    assert read(second).task == "task and summary"
    assert [e.observation for e in read(second).exchanges] == ["3", "4\n"]
    assert not any("is_copied_context" in step for step in second["steps"])


def test_terminus_calls_are_terminus_2s(tasks, chat):
    def reply(*keys, done):
        commands = [{"keystrokes": f"{k}\n", "duration": 0.1} for k in keys]
        return json.dumps({"analysis": "", "plan": "", "commands": commands, "task_complete": done})

    said = [reply("echo a", "echo b", done=False), reply(done=True), reply(done=True)]
    sampler = ScriptedSampler(chat, {0: said})
    chunks = play(tasks, sampler, chat, protocol="terminus", max_reply=400)
    transcript = make_transcribe(chat, "tokens")(chunks)
    (document,) = documents(chunks, transcript, "terminus", "run", "trial")
    check(document)
    first, second, _ = document["steps"][2:]
    assert [(c["function_name"], c["arguments"]) for c in first["tool_calls"]] == [
        ("bash_command", {"keystrokes": line.text, "duration": line.wait_s})
        for line in parse(said[0], "terminus").lines
    ]
    assert (
        len(first["tool_calls"]) == 2
        and "echo b" in first["tool_calls"][1]["arguments"]["keystrokes"]
    )
    assert "source_call_id" not in first["observation"]["results"][0]
    assert [c["function_name"] for c in second["tool_calls"]] == ["mark_task_complete"]
    assert [e.reply for e in read(document).exchanges] == said
    for exchange, turn in zip(read(document).exchanges, chunks[0].turns[1:], strict=False):
        np.testing.assert_array_equal(chat.observation(exchange.observation), turn.context)


def test_tokens_of_another_chat_are_named(recorded, chat):
    transcribe = make_transcribe(chat, "tokens")
    t = recorded[2]
    turns = [*t.turns[:2], dataclasses.replace(t.turns[2], context=t.turns[2].context[:-1])]
    with pytest.raises(ValueError, match="trial 2, turn 1: a message around it does not end as"):
        transcribe([dataclasses.replace(t, turns=tuple(turns))])
    with pytest.raises(ValueError, match="retokenized"):
        make_transcribe(chat, "retokenized")


def put(*path, value):
    """A change of a document: the value at the end of the path."""

    def change(document):
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return change


CALL = {"tool_call_id": "a", "function_name": "f", "arguments": {}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("x", value=1), "trajectory: unknown key x"),
        (put("schema_version", value="ATIF-v2.0"), "schema_version: 'ATIF-v2.0' is none of"),
        (put("schema_version", value=None), "trajectory: lacks schema_version"),
        (put("agent", "version", value=1), "agent.version: is not a string"),
        (put("agent", "x", value=1), "agent: unknown key x"),
        (put("steps", value=[]), "steps: is empty"),
        (put("steps", value={}), "steps: is not a list"),
        (put("steps", 3, value=[]), "steps[3]: is not an object"),
        (put("steps", 3, "step_id", value=5), "steps[3]: step_id 5 should be 4"),
        (put("steps", 3, "step_id", value=True), "steps[3].step_id: is not a count"),
        (put("steps", 3, "source", value="tool"), "steps[3].source: 'tool' is none of"),
        (put("steps", 3, "message", value=None), "steps[3]: lacks message"),
        (put("steps", 3, "message", value=1), "steps[3].message: is neither"),
        (put("steps", 3, "x", value=None), "steps[3]: unknown key x"),
        (put("steps", 3, "timestamp", value="noon"), "steps[3].timestamp: 'noon' is no time"),
        (put("steps", 1, "metrics", value={}), "steps[1]: metrics belongs to agent steps"),
        (put("steps", 1, "tool_calls", value=[]), "steps[1]: tool_calls belongs to agent steps"),
        (put("steps", 0, "model_name", value="m"), "steps[0]: model_name belongs to agent steps"),
        (put("steps", 3, "llm_call_count", value=0), "steps[3]: metrics needs a call of the model"),
        (put("steps", 3, "metrics", "x", value=1), "steps[3].metrics: unknown key x"),
        (put("steps", 3, "metrics", "prompt_tokens", value=-1), "metrics.prompt_tokens: is not a"),
        (put("steps", 3, "metrics", "logprobs", 2, value="0"), "steps[3].metrics.logprobs[2]: is"),
        (put("steps", 3, "metrics", "logprobs", 2, value=float("nan")), "not a finite number"),
        (put("steps", 3, "metrics", "prompt_token_ids", 4, value=1.0), "prompt_token_ids[4]: is"),
        (put("steps", 3, "metrics", "logprobs", value=[]), "steps[3].metrics: 0 logprobs of"),
        (put("steps", 3, "metrics", "extra", value=[]), "steps[3].metrics.extra: is not an object"),
        (
            put("steps", 3, "tool_calls", 0, "name", value="f"),
            "steps[3].tool_calls[0]: unknown key name",
        ),
        (
            put("steps", 3, "tool_calls", value=[{"tool_call_id": "a", "function_name": "f"}]),
            "steps[3].tool_calls[0]: lacks arguments",
        ),
        (
            put("steps", 3, "tool_calls", value=[CALL]),
            "steps[3].observation.results[0]: source_call_id 'call_1_1' is no call here",
        ),
        (put("steps", 3, "observation", value={}), "steps[3].observation: lacks results"),
        (
            put("steps", 3, "observation", "results", 0, "x", value=1),
            "steps[3].observation.results[0]: unknown key x",
        ),
        (
            put("steps", 3, "observation", "results", 0, "subagent_trajectory_ref", value=[{}]),
            "subagent_trajectory_ref[0]: lacks both",
        ),
        (
            put("steps", 3, "message", value=[{"type": "text", "source": None}]),
            "steps[3].message[0]: of type text needs text and no source",
        ),
        (put("final_metrics", "steps", value=1), "final_metrics: unknown key steps"),
        (put("extra", value="x"), "extra: is not an object"),
    ],
)
def test_every_deviation_is_named(exported, change, message):
    document = copy.deepcopy(exported[2])
    change(document)
    with pytest.raises(AtifError) as caught:
        check(document)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_trajectories_within_trajectories_are_checked(exported):
    inner = exported[0]
    whole = exported[1] | {"subagent_trajectories": [inner]}
    check(whole)
    for inside, message in (
        ([inner, inner], "subagent_trajectories[1]: needs a trajectory_id of its own"),
        ([inner | {"steps": []}], "subagent_trajectories[0].steps: is empty"),
    ):
        with pytest.raises(AtifError) as caught:
            check(whole | {"subagent_trajectories": inside})
        assert message in str(caught.value)
    deep = exported[0]
    for i in range(2000):
        deep = exported[0] | {"trajectory_id": str(i), "subagent_trajectories": [deep]}
    with pytest.raises(AtifError, match="nested too deeply"):
        check(deep)


def test_documents_of_other_harnesses_are_read():
    agent = {"source": "agent", "model_name": "m", "reasoning_content": "why", "tool_calls": [CALL]}
    result = {"source_call_id": "a", "content": [{"type": "text", "text": "out"}]}
    steps = [
        {"source": "user", "message": "do it"},
        agent | {"message": "one", "observation": {"results": [result, {"content": "more"}]}},
        agent | {"message": "two", "is_copied_context": True},
        {"source": "user", "message": "go on"},
        {"source": "agent", "message": "three", "llm_call_count": 0},
        {"source": "agent", "message": "four", "timestamp": "2026-01-01T00:00:00Z"},
    ]
    document = {
        "schema_version": "ATIF-v1.6",
        "agent": {"name": "other", "version": "2"},
        "steps": [{"step_id": i + 1} | step for i, step in enumerate(steps)],
    }
    transcript = read(document)
    assert (transcript.system, transcript.task, transcript.resolved) == (None, "do it", None)
    assert [dataclasses.astuple(e) for e in transcript.exchanges] == [
        ("one", "out\nmore", False),
        ("two", "go on", True),
        ("three", None, True),
        ("four", None, False),
    ]
    image = {"type": "image", "source": {"media_type": "image/png", "path": "x.png"}}
    document["steps"][1]["message"] = [image]
    with pytest.raises(AtifError, match=r"steps\[1\].message\[0\]: an image"):
        read(document)
    with pytest.raises(AtifError, match="no user step"):
        read(document | {"steps": [{"step_id": 1, "source": "agent", "message": ""}]})


@pytest.fixture(scope="module")
def run(recorded, tmp_path_factory):
    """A run folder of two steps."""
    run = tmp_path_factory.mktemp("runs") / "scripted"
    write_config(tiny.get_config("debug"), run)
    store.write_step(run / "trajectories", 0, recorded)
    later = [dataclasses.replace(t, trial=t.trial + 5) for t in recorded[:2]]
    store.write_step(run / "trajectories", 12, later)
    return run


def render(run, kind="atif"):
    return export.make_render(read_experiment(tiny.get_config("debug")), kind, run.name)


def contents(out) -> dict:
    return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(out.glob("*.json"))}


def test_an_export_is_completed_not_repeated(run, tmp_path, exported):
    counts = export.export_step(run, 0, render(run), tmp_path)
    assert counts == {"written": 4, "kept": 0, "without_reply": 1}
    before = contents(tmp_path)
    assert list(before) == [f"step_000000-trial_{i:09d}.json" for i in range(4)]
    document = orjson.loads(before["step_000000-trial_000000002.json"][0])
    assert document["session_id"] == "scripted" and document["steps"] == exported[2]["steps"]
    (tmp_path / "step_000000-trial_000000001.json").unlink()
    counts = export.export_step(run, 0, render(run), tmp_path)
    assert counts == {"written": 1, "kept": 3, "without_reply": 1}
    after = contents(tmp_path)
    changed = [name for name in before if after[name][1] != before[name][1]]
    assert changed == ["step_000000-trial_000000001.json"]
    assert all(after[name][0] == before[name][0] for name in before)
    os.utime(store.step_path(run / "trajectories", 0), (time.time() + 60,) * 2)  # made again
    assert export.export_step(run, 0, render(run), tmp_path)["written"] == 4


def test_a_folder_is_one_exports_own(run, tmp_path):
    export.mark(tmp_path, run, "atif")
    export.mark(tmp_path, run, "atif")
    for other in ((run, "rollout_details"), (run.parent, "atif")):
        with pytest.raises(ConfigError, match="holds another export"):
            export.mark(tmp_path, *other)
    (tmp_path / export.MARK).unlink()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="holds other files"):
        export.mark(tmp_path, run, "atif")


def test_runs_that_cannot_be_exported_are_refused(run, tmp_path):
    assert export.chosen_steps(run, None) == [0, 12] and export.chosen_steps(run, 12) == [12]
    with pytest.raises(ConfigError, match="--step=3 is not recorded, there are 0 to 12"):
        export.chosen_steps(run, 3)
    with pytest.raises(ConfigError, match="no recorded trajectories"):
        export.chosen_steps(tmp_path, None)
    config = tiny.get_config("debug")
    config.update_from_flattened_dict(
        {"episode.history": "retokenized", "chat_template": str(DROPS)}
    )
    with pytest.raises(ConfigError, match="retokenized"):
        export.make_render(read_experiment(config), "atif", "run")


def test_the_main(run, tmp_path):
    flags = ("--format=rollout_details", "--step=12")
    out, _ = finish(start("t1jax.export", f"--run={run}", f"--out={tmp_path / 'out'}", *flags))
    counts = json.loads(out.splitlines()[-1])
    assert counts == {"steps": 1, "written": 2, "kept": 0, "without_reply": 0}
    name = "step_000012-trial_000000006"
    result = orjson.loads((tmp_path / "out" / f"{name}.json").read_bytes())
    (t,) = [t for t in store.read_step(run / "trajectories", 12) if t.trial == 6]
    assert result == orjson.loads(orjson.dumps(trial_result([t], name)))
    bad = tmp_path / "bad/trajectories/step_000000.parquet"
    write_config(tiny.get_config("debug"), tmp_path / "bad")
    bad.parent.mkdir()
    bad.write_bytes(b"no parquet")
    for arguments, says in (
        ((f"--run={tmp_path}",), "is this a run?"),
        ((f"--run={tmp_path / 'bad'}",), "cannot read"),
        ((f"--run={run}", "--format=csv"), "--format"),
    ):
        process = start("t1jax.export", f"--out={tmp_path / 'none'}", *arguments)
        _, err = process.communicate(timeout=300)
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert process.returncode == 1 and len(lines) == 1 and says in lines[0], err
