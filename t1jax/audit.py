"""Offline proof that a recorded run is what it says: the sampler's ids, its experts, its rewards, right advantages.

    python -m t1jax.audit --run=DIR

Reads the run folder alone and computes everything anew, without the code that trained:

    trials   each number once, its chunks in order, one verdict and reward for all of them, that of the config
    TITO     ids marked as sampled are those of the reply's digest, which the sampler took; each stream begins
             with context; turns that open a chunk, and no others, are joined by "split"
    R3       N-1 rows of distinct experts that exist; all tokens of a step by its version of the weights; the
             trainer's log-probs under them are the sampler's, within train.parity_band
    GAE      advantages and returns from the stored values and rewards, by the recursion's definition

The first offence ends it with exit code 1. Otherwise prints how turns were joined, the histogram of (s, u), and
as its last line a JSON object.
"""

import itertools
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from absl import flags
from ml_collections import ConfigDict

from t1jax import command
from t1jax.agent.chat import Chat
from t1jax.agent.stitch import count
from t1jax.agent.verify import reward
from t1jax.experiment import ConfigError, Experiment, read_experiment
from t1jax.metrics import read_metrics
from t1jax.rollout import store
from t1jax.run import make_chat
from t1jax.types import Trajectory

TOLERANCE = 1e-4  # of advantages and returns, which were computed in float32


class Offence(RuntimeError):
    """What does not hold, and where: one line."""


def audit_run(run: Path) -> dict:
    """Checks a run folder; returns what the last line prints. Raises Offence, ConfigError or StoreError."""
    try:
        config = json.loads((run / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run / 'config.json'} cannot be read, is this a run? {error}") from None
    experiment = read_experiment(ConfigDict(config))
    trained = {line["step"] for line in read_metrics(run)}
    stored = store.steps(run / "trajectories")
    if missing := trained - set(stored):
        raise Offence(f"step {min(missing)} was trained on, but its trajectories are not there")
    chat, audits, changed, replies = make_chat(experiment), [], 0, 0
    for step in stored:
        trajectories = store.read_step(run / "trajectories", step)
        try:
            check_step(experiment, step, trajectories)
            if step in trained:
                inferred = store.read_advantages(run / "advantages", step)
                check_advantages(experiment, trajectories, inferred)
        except ValueError as error:
            raise Offence(f"step {step}, {error}") from None
        audits.append(count(trajectories))
        turns = [turn for t in trajectories for turn in t.turns]
        replies += len(turns)
        changed += sum(not unchanged(chat, turn.sampled) for turn in turns)
    total = sum(audits[1:], audits[0]) if audits else count([])
    return {
        "steps": len(stored),
        "replies": replies,
        "changed_by_encoding_again": changed,
        "sampled": total.sampled,
        "drift": total.drift,
        "joins": dict(sorted(total.joins.items())),
        "drops": {f"{s},{u}": n for (s, u), n in sorted(total.drops.items())},
    }


def check_step(experiment: Experiment, step: int, trajectories: list[Trajectory]) -> None:
    """What holds for every chunk of a step. Raises ValueError with the first that does not."""
    size = experiment.rollout.trials
    trials = [t.trial for t in trajectories if t.chunk == 0]
    if trials != list(range(step * size, (step + 1) * size)):
        raise ValueError(
            f"its {size} trials are not there once each and in order: {trials[:5]} ..."
        )
    for before, t in itertools.pairwise([None, *trajectories]):
        place = f"trial {t.trial}, chunk {t.chunk}: "
        if t.chunk:
            if before is None or (t.trial, t.chunk) != (before.trial, before.chunk + 1):
                raise ValueError(f"{place}the chunk before it is not there")
            if (t.reward, t.verdict, t.status) != (before.reward, before.verdict, before.status):
                raise ValueError(f"{place}another outcome than the chunk before it")
        check_reward(experiment, t, place)
        check_stream(experiment, t, place)
        check_experts(experiment, t, step, place)


def check_reward(experiment: Experiment, t: Trajectory, place: str) -> None:
    """The reward is that of the verdict, by the configured rule."""
    config = experiment.reward
    wanted = t.verdict and reward(t.verdict, config.kind, config.scale)
    if t.reward != wanted:
        raise ValueError(f"{place}reward {t.reward}, the verdict gives {wanted}")


def check_stream(experiment: Experiment, t: Trajectory, place: str) -> None:
    """Records are aligned, and the sampled ids are the sampler's (TITO)."""
    try:
        t.check()
    except ValueError as error:
        raise ValueError(f"chunk {t.chunk} of {error}") from None
    outside = np.flatnonzero((t.tokens < 0) | (t.tokens >= experiment.model.vocab_size))
    if len(outside):
        raise ValueError(f"{place}token {outside[0]} is {t.tokens[outside[0]]}, no id of the model")
    if len(t.sampled) and t.sampled[0]:
        raise ValueError(f"{place}the first token is sampled, but nothing stands before it")
    for i, turn in enumerate(t.turns):
        if turn.drifted:
            raise ValueError(
                f"{place}turn {i} holds {turn.drifted} ids that the sampler did not say"
            )
        if (turn.join == "split") != (i == 0):
            raise ValueError(f"{place}turn {i} is joined by {turn.join!r}")


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


def check_advantages(
    experiment: Experiment, trajectories: list[Trajectory], inferred: dict
) -> None:
    """Log-probs of trainer and sampler agree; advantages and returns follow from values and rewards."""
    rows = [t for t in trajectories if t.turns and t.reward is not None]
    if list(inferred) != [(t.trial, t.chunk) for t in rows]:
        raise ValueError("its advantages are of other rows than its trajectories")
    expected = []
    for t in rows:
        found = inferred[t.trial, t.chunk]
        place = f"trial {t.trial}, chunk {t.chunk}: "
        if any(len(values) != len(t.tokens) for values in found.values()):
            raise ValueError(f"{place}{len(t.tokens)} tokens have other numbers of advantages")
        gap = np.where(t.sampled, np.abs(found["old_logp"] - t.logprobs), 0)
        if not gap.max(initial=0) <= experiment.train.parity_band:
            raise ValueError(
                f"{place}token {gap.argmax()}: trainer and sampler differ by {gap.max():.3g} nats, the "
                f"band is {experiment.train.parity_band:g}"
            )
        ppo = experiment.ppo
        expected.append(gae(t, found["values"], ppo.gamma, ppo.lam))
    if experiment.ppo.whiten:
        expected = whiten(expected, [t.sampled for t in rows])
    for t, (advantages, returns) in zip(rows, expected, strict=True):
        found = inferred[t.trial, t.chunk]
        for name, wanted in (("advantages", advantages), ("returns", returns)):
            off = np.abs(found[name] - wanted)
            if not off.max(initial=0) <= TOLERANCE:
                raise ValueError(
                    f"trial {t.trial}, chunk {t.chunk}: {name} of token {off.argmax()} are "
                    f"{found[name][off.argmax()]:.6g}, its values give {wanted[off.argmax()]:.6g}"
                )


def gae(t: Trajectory, values: np.ndarray, gamma: float, lam: float) -> tuple:
    """(advantages, returns) f64[N], 0 on context: the recursion, written over sampled tokens alone (T1).

    The reward stands on the last of them, and nothing is worth anything behind it.
    """
    advantages, returns = np.zeros(len(values)), np.zeros(len(values))
    ahead = value_ahead = 0.0
    last_reward = t.reward
    for i in reversed(np.flatnonzero(t.sampled)):
        delta = last_reward + gamma * value_ahead - values[i]
        ahead = advantages[i] = delta + gamma * lam * ahead
        returns[i] = ahead + values[i]
        value_ahead, last_reward = values[i], 0.0
    return advantages, returns


def whiten(expected: list[tuple], masks: Iterable[np.ndarray]) -> list[tuple]:
    """Advantages with mean 0 and variance 1 over all sampled tokens."""
    masks = list(masks)
    every = np.concatenate([a[mask] for (a, _), mask in zip(expected, masks, strict=True)])
    return [
        (np.where(mask, (a - every.mean()) / np.sqrt(every.var() + 1e-8), 0), r)
        for (a, r), mask in zip(expected, masks, strict=True)
    ]


def unchanged(chat: Chat, ids: np.ndarray) -> bool:
    """Whether a reply's text would be encoded to the same ids."""
    return np.array_equal(chat.encode_rendered(chat.decode(ids)), ids)


def report(result: dict) -> str:
    """The result as lines of text."""
    lines = [
        f"{result['steps']} steps, {result['replies']} replies, {result['sampled']} sampled ids"
    ]
    lines.append(f"drift {result['drift']:.4%}")
    share = result["changed_by_encoding_again"] / max(result["replies"], 1)
    lines.append(f"replies that encoding again would change: {share:.2%}")
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
