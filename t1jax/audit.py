"""Checks of a recorded run: the sampler's ids, its experts, its rewards, right advantages.

    python -m t1jax.audit --run=DIR

Reads the run folder, and the tasks, tokenizer, chat template and initial policy that its config names. What is
proven:

    every step      Each trial is there once, its chunks in order, with one verdict, the reward that the config gives
                    it and an end that its turns can have come to (see outcome.py). Its task is that of the pool,
                    where the folder of tasks is still there. TITO: ids marked as sampled have the digest that the
                    sampler took, and say what was run; a stream begins with context, and turns that open a chunk,
                    and no others, are joined by "split". R3: N-1 rows of distinct experts that exist, all tokens of
                    a step by its version of the weights, at the configured temperature; with history "tokens",
                    context is the template around the output of the last command.
    trained steps   GAE: advantages and returns follow from the stored values and rewards, in float64. The
                    trainer's stored log-probs are the sampler's, within train.parity_band.
    recomputed      The stored log-probs and values are those of the stored tokens and experts under the policy that
    steps           sampled them: step 0, critic warm-up, and steps of a checkpoint (see recompute.py). Only this
                    shows that row t holds the experts of token t, layer by layer, and that no context id was changed;
                    nothing shows it of the other steps. With ppo.replay=False experts take no part.

Not proven: a reply whose ids and digest were both replaced by others that say the same, outside of recomputed steps.
Text histories are repaired behind the sampler's back, so their band must be wide; `gap_strict` is the gap of the
turns before the first repair of each chunk, which should be as small as with history "tokens". With history
"retokenized" the trainer gets ids that were encoded, not sampled: such a run has no TITO and does not pass.

The first offence ends it with exit code 1. Otherwise prints how turns were joined, the histogram of (s, u), and
as its last line a JSON object. A kill may leave one last step whose batch was not trained on; the rest must be whole.
"""

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import flags
from ml_collections import ConfigDict

from t1jax import command
from t1jax.agent.action import Malformed, observation, parse
from t1jax.agent.chat import Chat
from t1jax.agent.episode import describe, summary_request
from t1jax.agent.stitch import MAX_PROMPT_DROP, MAX_REPLY_DROP, count
from t1jax.agent.task import load_tasks
from t1jax.experiment import ConfigError, Experiment, read_experiment
from t1jax.metrics import read_metrics
from t1jax.outcome import check_trial
from t1jax.recompute import check_inferred, gaps, make_recompute, saved_steps
from t1jax.rollout import store
from t1jax.run import make_chat, shuffle_pool
from t1jax.types import Task, Trajectory

REPAIRS = ("normalized", "retokenized")  # joins behind the sampler's back


class Offence(RuntimeError):
    """What does not hold, and where: one line."""


def audit_run(run: Path) -> dict:
    """Checks a run folder; returns what the last line prints.

    Raises Offence, or ConfigError, StoreError, MetricsError, CheckpointError for files that cannot be read.
    """
    experiment = read_config(run)
    if experiment.episode.history == "retokenized":
        raise Offence(
            "episode.history=retokenized trains on ids that were encoded, not sampled: it is not TITO"
        )
    pool = read_pool(experiment, run)
    chat, recompute = make_chat(experiment), make_recompute(experiment, run)
    total, steps, changed, replies, recomputed = count([]), 0, 0, 0, 0
    gap = gap_strict = 0.0
    for step in check_steps(run):
        trajectories = store.read_step(run / "trajectories", step)
        try:
            check_step(experiment, chat, pool, step, trajectories)
            if store.step_path(run / "advantages", step).exists():
                inferred = store.read_advantages(run / "advantages", step)
                rows = [t for t in trajectories if t.turns and t.reward is not None]
                again = recompute(step, rows)
                check_inferred(experiment, rows, inferred, again)
                recomputed += bool(again)
                for t in rows:
                    nats = gaps(t, inferred[t.trial, t.chunk])
                    gap = max(gap, float(nats.max()))
                    gap_strict = max(gap_strict, float(nats[before_repair(t)].max(initial=0)))
        except ValueError as error:
            raise Offence(f"step {step}, {error}") from None
        total += count(trajectories)
        turns = [turn for t in trajectories for turn in t.turns]
        replies += len(turns)
        changed += sum(not unchanged(chat, turn.sampled) for turn in turns)
        steps += 1
    return {
        "steps": steps,
        "recomputed": recomputed,
        "tasks_checked": pool is not None,
        "replies": replies,
        "changed_by_encoding_again": changed,
        "sampled": total.sampled,
        "drift": total.drifted,
        "gap": gap,
        "gap_strict": gap_strict,
        "joins": dict(sorted(total.joins.items())),
        "drops": {f"{s},{u}": n for (s, u), n in sorted(total.drops.items())},
    }


def read_config(run: Path) -> Experiment:
    """What the run was. Raises ConfigError."""
    path = run / "config.json"
    try:
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise ValueError("it holds no JSON object")
        config = ConfigDict(config)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read, is this a run? {error}") from None
    return read_experiment(config)


def read_pool(experiment: Experiment, run: Path) -> Sequence[Task] | None:
    """Item i is the task of trial i; None where the folder of tasks is gone. Raises TaskError."""
    folder = Path(experiment.tasks.train or run / "tasks/train")
    return shuffle_pool(load_tasks(folder), experiment.seed) if folder.is_dir() else None


def check_steps(run: Path) -> list[int]:
    """The steps stored: all from 0 on, with all that is written of a step. Raises Offence.

    Only the last may lack metrics and advantages, where a kill came between; but not behind a checkpoint. A run
    that goes on drops what is behind its checkpoint, the metrics first: a kill then may leave several.
    """
    stored, inferred = (store.steps(run / name) for name in ("trajectories", "advantages"))
    trained = [line["step"] for line in read_metrics(run)]
    saved, measured = saved_steps(run), max(trained, default=-1) + 1
    dropping = measured in (0, *saved)
    done = max([measured, *saved, *([] if dropping else stored)])
    for step in range(done):
        for name, there in (
            ("trajectories", stored),
            ("advantages", inferred),
            ("metrics", trained),
        ):
            if step not in there:
                raise Offence(f"step {step} was trained on, but its {name} are not there")
    if not stored:
        raise Offence("no step is stored, so there is nothing to check")
    return stored


def check_step(
    experiment: Experiment,
    chat: Chat,
    pool: Sequence[Task] | None,
    step: int,
    trajectories: list[Trajectory],
) -> None:
    """What holds for every chunk of a step. Raises ValueError with the first that does not."""
    size = experiment.rollout.trials
    trials = [t.trial for t in trajectories if t.chunk == 0]
    if trials != list(range(step * size, (step + 1) * size)):
        raise ValueError(
            f"its {size} trials are not there once each and in order: {trials[:5]} ..."
        )
    for _, chunks in itertools.groupby(trajectories, lambda t: t.trial):
        chunks = list(chunks)
        check_trial(experiment, pool, chunks)
        for t in chunks:
            place = f"trial {t.trial}, chunk {t.chunk}: "
            check_stream(experiment, t, place)
            check_words(experiment, chat, t, place)
            check_experts(experiment, t, step, place)


def check_stream(experiment: Experiment, t: Trajectory, place: str) -> None:
    """Records are aligned, and the sampled ids are the sampler's (TITO)."""
    try:
        t.check()
    except ValueError as error:
        raise ValueError(f"chunk {t.chunk} of {error}") from None
    wanted = experiment.rollout.sampling.temperature
    if t.temperature != wanted:
        raise ValueError(f"{place}temperature {t.temperature:g}, the config's is {wanted:g}")
    outside = np.flatnonzero((t.tokens < 0) | (t.tokens >= experiment.model.vocab_size))
    if len(outside):
        raise ValueError(f"{place}token {outside[0]} is {t.tokens[outside[0]]}, no id of the model")
    if len(t.sampled) and t.sampled[0]:
        raise ValueError(f"{place}the first token is sampled, but nothing stands before it")
    if len(t.tokens) > experiment.episode.max_context:
        raise ValueError(f"{place}{len(t.tokens)} tokens are more than episode.max_context")
    joins = ("strict",) if experiment.episode.history == "tokens" else ("strict", *REPAIRS)
    for i, turn in enumerate(t.turns):
        if turn.drifted:
            raise ValueError(
                f"{place}turn {i} holds {turn.drifted} ids that the sampler did not say"
            )
        if turn.join not in (joins if i else ("split",)):
            raise ValueError(f"{place}turn {i} is joined by {turn.join!r}")
        s, u = turn.drop
        within = 0 <= s <= MAX_PROMPT_DROP and 0 <= u <= MAX_REPLY_DROP
        if not within or (turn.join == "normalized") != (s + u > 0):
            raise ValueError(f"{place}turn {i}, joined by {turn.join!r}, dropped {turn.drop}")


def check_words(experiment: Experiment, chat: Chat, t: Trajectory, place: str) -> None:
    """Replies say what was run; with history "tokens", contexts say what came of it."""
    config, context, closed = experiment.episode, None, False
    for i, turn in enumerate(t.turns):
        summary = turn.action == "summary"
        if summary and config.history == "tokens":
            context = chat.observation(summary_request(config.max_summary), closed)
        if context is not None and not np.array_equal(turn.context, context):
            raise ValueError(f"{place}the context of turn {i} is not what turn {i - 1} came to")
        closed = chat.stop_ids[0] in turn.sampled[-1:]
        action = parse(chat.reply_text(turn.sampled), config.protocol)
        said = ("none", None) if turn.finish != "stop" else tuple(describe(action).values())
        if not summary and (turn.action, turn.command) != said:
            raise ValueError(
                f"{place}turn {i} is {turn.action} {turn.command!r}, its ids say {said[0]} {said[1]!r}"
            )
        context = None
        if config.history == "tokens" and (turn.result or isinstance(action, Malformed)):
            context = chat.observation(observation(action, turn.result, config.protocol), closed)


def check_experts(experiment: Experiment, t: Trajectory, step: int, place: str) -> None:
    """Every row names as many distinct experts as the model uses, under one version of the weights (R3)."""
    if not t.turns:
        return
    model = experiment.model
    if t.experts.shape[1:] != (model.num_layers, model.experts_per_token):
        raise ValueError(f"{place}experts {t.experts.shape[1:]} (layers, experts a token)")
    ordered = np.sort(t.experts, axis=-1)
    bad = (ordered[..., -1] >= model.num_experts) | (np.diff(ordered, axis=-1) == 0).any(-1)
    if bad.any():
        token, layer = np.argwhere(bad)[0]
        raise ValueError(
            f"{place}token {token}, layer {layer} has experts {t.experts[token, layer].tolist()} of "
            f"{model.num_experts}"
        )
    if other := set(t.versions.tolist()) - {step}:
        raise ValueError(f"{place}tokens of weights {min(other)}")


def before_repair(t: Trajectory) -> np.ndarray:
    """bool[N]: the tokens of turns that the sampler read as they stand."""
    repaired = [i for i, turn in enumerate(t.turns) if turn.join in REPAIRS]
    return t.turn_index < min(repaired, default=len(t.turns))


def unchanged(chat: Chat, ids: np.ndarray) -> bool:
    """Whether a reply's text would be encoded to the same ids."""
    return np.array_equal(chat.encode_rendered(chat.decode(ids)), ids)


def report(result: dict) -> str:
    """The result as lines of text."""
    share = result["changed_by_encoding_again"] / max(result["replies"], 1)
    lines = [
        f"{result['steps']} steps, {result['replies']} replies, {result['sampled']} sampled ids",
        f"recomputed from their weights: {result['recomputed']} of {result['steps']} steps",
        f"tasks: {'those of the pool' if result['tasks_checked'] else 'not compared, their folder is gone'}",
        f"ids that the sampler did not say: {result['drift']}",
        f"trainer and sampler: {result['gap']:.3g} nats apart, {result['gap_strict']:.3g} before repairs",
        f"replies that encoding again would change: {share:.2%}",
    ]
    lines += [f"joined by {name:12} {n:8}" for name, n in result["joins"].items()]
    lines += [f"dropped (s,u) = ({pair}) {n:8}" for pair, n in result["drops"].items()]
    return "\n".join(lines)


def main() -> None:
    try:
        result = audit_run(Path(RUN.value))
    except Offence as offence:
        command.fail(f"{RUN.value}: {offence}")
    print(report(result), file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    RUN = flags.DEFINE_string("run", None, "The run's folder.", required=True)
    command.run(main)
