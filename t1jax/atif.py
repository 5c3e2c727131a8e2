"""Trials as ATIF documents (see atif_format.py) and as Harbor's rollout details, and documents as transcripts.

A document holds one stream. A trial of several chunks is a document each: `continued_trajectory_ref` names the next
one's file. What its prompt repeats are steps of copied context. `session_id` is the run, `extra` of the document what
became of the trial.

A step's prompt is the stream up to its reply, which is what the sampler read, but behind a repair of a text history
(`extra.join` of the metrics, see agent/stitch.py). The experts of its tokens are in the rollout details alone: as JSON
they are larger than all the rest.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from t1jax.agent.action import Malformed, Protocol, Submit, parse
from t1jax.atif_format import VERSION, AtifError, check
from t1jax.transcript import SUMMARY, Exchange, Transcript
from t1jax.types import Trajectory, Turn

AGENT = {"name": "t1jax", "version": "1"}
SUBMIT = {"bash": "submit", "terminus": "mark_task_complete"}  # the second is Terminus-2's own


def file_names(name: str, count: int) -> list[str]:
    """The files of a trial's documents, as Terminus-2 names them."""
    return [f"{name}.json", *(f"{name}.cont-{i}.json" for i in range(1, count))]


def documents(
    chunks: Sequence[Trajectory],
    transcripts: Sequence[Transcript],
    protocol: Protocol,
    run: str,
    name: str,
) -> list[dict]:
    """A document a chunk, chunks of one trial in order; `run` and `name` tell it from others."""
    files, out, done = file_names(name, len(chunks)), [], 0
    turns = [turn for chunk in chunks for turn in chunk.turns]
    for i, (chunk, transcript) in enumerate(zip(chunks, transcripts, strict=True)):
        done += len(chunk.turns)
        steps = _steps(transcript, turns, done, protocol)
        replies = [step for step in steps if step["source"] == "agent"][-len(chunk.turns) :]
        for step, turn, prompt in zip(replies, chunk.turns, _prompts(chunk), strict=True):
            step |= {"model_name": f"policy-{turn.version}", "metrics": _metrics(turn, prompt)}
        document = {
            "schema_version": VERSION,
            "session_id": run,
            "trajectory_id": f"{run}/{files[i].removesuffix('.json')}",
            "agent": AGENT | {"extra": {"protocol": protocol}},
            "steps": [{"step_id": number} | step for number, step in enumerate(steps, 1)],
            "final_metrics": {
                "total_prompt_tokens": sum(s["metrics"]["prompt_tokens"] for s in replies),
                "total_completion_tokens": sum(len(turn.sampled) for turn in chunk.turns),
                "total_steps": len(steps),
            },
            "extra": outcome(chunk),
        }
        if i + 1 < len(chunks):
            document["continued_trajectory_ref"] = files[i + 1]
        out.append(document)
    return out


def outcome(trajectory: Trajectory) -> dict[str, Any]:
    """What became of a trial: the same for all its chunks. `reward` is the trainer's."""
    names = ("task", "family", "trial", "attempt", "status", "cause", "temperature", "reward")
    return {name: getattr(trajectory, name) for name in names} | {"resolved": trajectory.resolved}


def rollout_details(chunks: Sequence[Trajectory]) -> list[dict]:
    """One entry a chunk, in it one list a turn (Harbor's RolloutDetail).

    extra.routed_experts [rows, L, K] of a turn are those of the tokens that it was the first to read: joined, the
    N-1 rows of the stream. The last len(completion_token_ids) of them chose the reply.
    """
    out = []
    for chunk in chunks:
        prompts = _prompts(chunk)
        ends = [len(p) + len(t.sampled) for p, t in zip(prompts, chunk.turns, strict=True)]
        rows = np.split(chunk.experts, [end - 1 for end in ends[:-1]])
        out.append(
            {
                "prompt_token_ids": [prompt.tolist() for prompt in prompts],
                "completion_token_ids": [turn.sampled.tolist() for turn in chunk.turns],
                "logprobs": [turn.logprobs.tolist() for turn in chunk.turns],
                "extra": {"routed_experts": [part.tolist() for part in rows]},
            }
        )
    return out


def trial_result(chunks: Sequence[Trajectory], name: str) -> dict:
    """What Harbor's result.json of a trial says of its tokens and its reward, and where."""
    verdict = chunks[0].verdict
    known = verdict is not None and verdict.outcome is not None
    return {
        "task_name": chunks[0].task,
        "trial_name": name,
        "agent_result": {
            "rollout_details": rollout_details(chunks),
            "metadata": outcome(chunks[0]),
        },
        "verifier_result": {"rewards": {"reward": float(verdict.outcome)}} if known else None,
    }


def read(document: Any) -> Transcript:
    """The conversation of a document. Raises AtifError.

    Messages are taken as they are: thoughts (`reasoning_content`) and tool calls that they do not spell out are left
    out. What is said to the agent after its first reply is part of what it read after the last one.
    """
    check(document)
    system, task, exchanges = [], [], []
    for i, step in enumerate(document["steps"]):
        message = _text(step["message"], f"steps[{i}].message")
        heard = _heard(step, f"steps[{i}]")
        if step["source"] == "agent":
            copied = bool(step.get("is_copied_context")) or step.get("llm_call_count") == 0
            exchanges.append((message, heard, copied))
        elif exchanges:
            exchanges[-1][1].extend([message, *heard])
        else:
            (system if step["source"] == "system" else task).extend([message, *heard])
    if not task:
        raise AtifError("steps: no user step comes before the first agent step")
    return Transcript(
        system="\n".join(system) if system else None,
        task="\n".join(task),
        exchanges=tuple(
            Exchange(reply, "\n".join(heard) if heard else None, copied)
            for reply, heard, copied in exchanges
        ),
        resolved=(document.get("extra") or {}).get("resolved"),
    )


def _heard(step: dict, place: str) -> list[str]:
    results = (step.get("observation") or {}).get("results", [])
    return [
        _text(result["content"], f"{place}.observation.results[{i}].content")
        for i, result in enumerate(results)
        if result.get("content") is not None
    ]


def _text(content: str | list, place: str) -> str:
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part["type"] != "text":
            raise AtifError(f"{place}[{i}]: an image, which this model does not read")
    return "".join(part["text"] for part in content)


def _prompts(chunk: Trajectory) -> list[np.ndarray]:
    """The stream up to each reply, i32[*]."""
    tokens, end, out = chunk.tokens, 0, []
    for turn in chunk.turns:
        out.append(tokens[: end + len(turn.context)])
        end += len(turn.context) + len(turn.sampled)
    return out


def _steps(
    transcript: Transcript, turns: Sequence[Turn], end: int, protocol: Protocol
) -> list[dict]:
    """Without their numbers. The transcript's exchanges are those of the turns before `end`."""
    steps = [
        {"source": "system", "message": transcript.system},
        {"source": "user", "message": transcript.task},
    ]
    if transcript.exchanges[0].copied:
        for step in steps:
            step["is_copied_context"] = True
    begin = end - len(transcript.exchanges)
    for i, exchange in enumerate(transcript.exchanges, begin):
        step = {"source": "agent", "message": exchange.reply}
        calls = [
            {"tool_call_id": f"call_{i}_{n}", "function_name": name, "arguments": arguments}
            for n, (name, arguments) in enumerate(_calls(turns[i], exchange.reply, protocol), 1)
        ]
        if calls:
            step["tool_calls"] = calls
        if exchange.copied:
            step["is_copied_context"] = True
        steps.append(step)
        if turns[i + 1 : end] and turns[i + 1].action == SUMMARY:
            steps.append({"source": "user", "message": exchange.observation})
        elif exchange.observation is not None:
            step["observation"] = {"results": [_result(turns[i], exchange.observation, calls)]}
    return steps


def _result(turn: Turn, content: str, calls: list[dict]) -> dict:
    result = {"content": content}
    if len(calls) == 1:  # what several of them printed is one text
        result["source_call_id"] = calls[0]["tool_call_id"]
    if turn.result:
        result["extra"] = {
            "exit_code": turn.result.exit_code,
            "seconds": turn.result.seconds,
            "timed_out": turn.result.timed_out,
        }
    return result


def _calls(turn: Turn, reply: str, protocol: Protocol) -> list[tuple[str, dict]]:
    """What the turn did, as function names and their arguments."""
    action = parse(reply, protocol) if turn.action in ("command", "submit") else Malformed("")
    if isinstance(action, Malformed):
        return []
    if protocol == "bash":
        calls = [("bash", {"command": line.text}) for line in action.lines]
    else:
        calls = [
            ("bash_command", {"keystrokes": line.text, "duration": line.wait_s})
            for line in action.lines
        ]
    return [*calls, (SUBMIT[protocol], {})] if isinstance(action, Submit) else calls


def _metrics(turn: Turn, prompt: np.ndarray) -> dict:
    return {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(turn.sampled),
        "prompt_token_ids": prompt.tolist(),
        "completion_token_ids": turn.sampled.tolist(),
        "logprobs": turn.logprobs.tolist(),
        "extra": {"finish_reason": turn.finish, "join": turn.join, "seconds": turn.seconds},
    }
