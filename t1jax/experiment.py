"""One run, typed: ConfigDict ends here, below it are frozen dataclasses.

The config file is the only place with values; a key that is missing, misspelt or of the wrong type is
one ConfigError that names it.
"""

import dataclasses
import itertools
import json
import math
import operator
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ml_collections import ConfigDict

from t1jax.agent.episode import EpisodeConfig
from t1jax.files import write_json
from t1jax.mesh import MeshConfig
from t1jax.model.config import ModelConfig
from t1jax.ppo.optim import OptimConfig
from t1jax.ppo.step import PPOConfig
from t1jax.rollout.fleet import FleetConfig
from t1jax.rollout.sglang import RESERVED
from t1jax.sandbox.pool import SandboxConfig
from t1jax.types import Sampling


class ConfigError(ValueError):
    """The configuration cannot be run: one line naming the key and what is wrong."""


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """Which tasks: folders of Harbor tasks, or "" for `*_count` generated ones.

    preflight: the file that t1jax.preflight wrote of the training tasks, whose unfit ones are left out; "" for none.
    """

    train: str
    eval: str
    preflight: str
    train_count: int
    eval_count: int
    seed: int


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    trials: int
    concurrency: int
    max_attempts: int
    max_infra_share: float
    sampling: Sampling


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """What samples: "jax", the embedded sampler, or "sglang", a fleet of servers (`fleet`)."""

    kind: Literal["jax", "sglang"]
    slots: int
    prefill_rows: int
    prefill_buckets: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    kind: Literal["dense", "binary", "ratio"]
    scale: float


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    steps: int
    warmup_steps: int
    buckets: tuple[int, ...]
    checkpoint_every: int
    checkpoint_keep: int
    parity_band: float
    flips_every: int  # steps between two counts of the experts that free routing chooses otherwise


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    attempts: int
    sampling: Sampling
    before: bool
    after: bool


@dataclasses.dataclass(frozen=True)
class SFTConfig:
    """trajectories: a folder of ATIF documents to imitate, or "" for scripts on `tasks` generated tasks."""

    trajectories: str
    tasks: int
    oracle_share: float
    row_length: int
    batch: int
    steps: int
    copy_steps: int
    learning_rate: float
    checkpoint_every: int


POSITIVE = (
    *("tasks.train_count", "tasks.eval_count", "episode.max_turns", "episode.max_context"),
    *("episode.max_reply", "episode.command_timeout_s", "episode.turn_timeout_s"),
    *("episode.agent_timeout_s", "episode.trial_timeout_s", "episode.max_output_bytes"),
    *("rollout.trials", "rollout.concurrency", "rollout.max_attempts", "rollout.max_infra_share"),
    *(
        "engine.slots",
        "engine.prefill_rows",
        "fleet.engines",
        "mesh.data",
        "reward.scale",
        "ppo.microbatch",
    ),
    *("train.steps", "train.checkpoint_every", "train.checkpoint_keep", "train.parity_band"),
    "train.flips_every",
    *("evaluate.attempts", "sft.tasks", "sft.row_length"),
    *("sft.batch", "sft.steps", "sft.learning_rate", "sft.checkpoint_every"),
    *("actor_optim.clip_norm", "actor_optim.eps", "critic_optim.clip_norm", "critic_optim.eps"),
)
NOT_NEGATIVE = (
    *("episode.compact_below", "episode.max_summary"),
    *("seed", "tasks.seed", "ppo.clip_low", "ppo.clip_high", "ppo.value_clip", "sft.copy_steps"),
    *("actor_optim.lr", "actor_optim.warmup_steps", "actor_optim.weight_decay"),
    *("critic_optim.lr", "critic_optim.warmup_steps", "critic_optim.weight_decay"),
)
SHARES = ("ppo.gamma", "ppo.lam", "rollout.max_infra_share", "sft.oracle_share")
DECAYS = ("actor_optim.b1", "actor_optim.b2", "critic_optim.b1", "critic_optim.b2")
# Each within the next one. The verifier has time of its own, by task.
DEADLINES = ("command_timeout_s", "turn_timeout_s", "agent_timeout_s", "trial_timeout_s")
RANGES = (
    (POSITIVE, lambda x: x > 0, "must be positive"),
    (NOT_NEGATIVE, lambda x: x >= 0, "must not be negative"),
    (SHARES, lambda x: 0 <= x <= 1, "must lie in 0..1"),
    (DECAYS, lambda x: 0 <= x < 1, "must be at least 0 and below 1"),
)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything a main needs to know, checked."""

    seed: int
    tokenizer: str
    chat_template: str
    initial_policy: str
    model: ModelConfig
    mesh: MeshConfig
    tasks: TaskConfig
    sandbox: SandboxConfig
    episode: EpisodeConfig
    rollout: RolloutConfig
    engine: EngineConfig
    fleet: FleetConfig
    reward: RewardConfig
    ppo: PPOConfig
    actor_optim: OptimConfig
    critic_optim: OptimConfig
    train: TrainConfig
    evaluate: EvaluateConfig
    sft: SFTConfig

    def __post_init__(self):
        for names, good, message in RANGES:
            for name in names:
                value = operator.attrgetter(name)(self)
                if value is not None and not good(value):
                    raise ConfigError(f"{name} = {value} {message}")
        for name in ("train.buckets", "engine.prefill_buckets"):
            if not min(operator.attrgetter(name)(self)) > 0:
                raise ConfigError(f"{name} must hold positive lengths")
        if self.model.param_dtype != "float32":
            raise ConfigError(
                f"model.param_dtype={self.model.param_dtype}: trained weights are float32, in another type "
                "small updates are lost; model.dtype is the one that computes"
            )
        if self.engine.kind == "jax" and self.rollout.concurrency > self.engine.slots:
            raise ConfigError(
                f"rollout.concurrency={self.rollout.concurrency} exceeds engine.slots="
                f"{self.engine.slots}: trials would wait for a slot on their own time"
            )
        if self.rollout.sampling.top_p != 1 or self.rollout.sampling.top_k:
            raise ConfigError(
                "rollout.sampling: training needs top_p = 1 and top_k = 0: the trainer's log-probs are "
                "those of the whole distribution"
            )
        if self.episode.history != "tokens" and not self.chat_template:
            raise ConfigError(
                f"episode.history={self.episode.history} renders a chat_template: name one"
            )
        if self.engine.kind == "sglang":
            self._check_fleet()
        for inner, outer in itertools.pairwise(DEADLINES):
            seconds, limit = getattr(self.episode, inner), getattr(self.episode, outer)
            if not seconds < limit:
                raise ConfigError(f"episode: {inner}={seconds:g} must be below {outer}={limit:g}")
        if self.rollout.trials % (self.ppo.microbatch * self.mesh.data):
            raise ConfigError(
                f"ppo.microbatch={self.ppo.microbatch} rows on each of mesh.data={self.mesh.data} devices "
                f"must divide rollout.trials={self.rollout.trials}"
            )
        if self.sft.batch % self.mesh.data:
            raise ConfigError(f"mesh.data={self.mesh.data} must divide sft.batch={self.sft.batch}")
        if self.episode.max_context > max(self.train.buckets):
            raise ConfigError(
                f"episode.max_context={self.episode.max_context} does not fit the largest of "
                f"train.buckets={self.train.buckets}"
            )
        if not 0 <= self.train.warmup_steps <= self.train.steps:
            raise ConfigError("train.warmup_steps must lie in 0..train.steps")
        if self.sft.row_length < self.episode.max_context:
            raise ConfigError("sft.row_length must hold episode.max_context tokens")

    def _check_fleet(self) -> None:
        fleet, server, episode = self.fleet, self.fleet.server, self.episode
        noticed = fleet.probe_failures * (fleet.probe_period_s + fleet.probe_timeout_s)
        if not max(noticed, fleet.reply_timeout_s) < episode.turn_timeout_s:
            raise ConfigError(
                f"fleet: its probes notice a hung engine after {noticed:g} s and reply_timeout_s="
                f"{fleet.reply_timeout_s:g}; both must be below episode.turn_timeout_s="
                f"{episode.turn_timeout_s:g}, or it is taken for a slow agent"
            )
        if self.rollout.concurrency > fleet.count * server.max_running:
            raise ConfigError(
                f"rollout.concurrency={self.rollout.concurrency} exceeds fleet.server.max_running="
                f"{server.max_running} on {fleet.count} engines: trials would wait on their own time"
            )
        if not fleet.urls and server.max_tokens < episode.max_context + RESERVED:
            raise ConfigError(
                f"fleet.server.max_tokens={server.max_tokens} does not hold one stream of "
                f"episode.max_context={episode.max_context} tokens and {RESERVED} more"
            )


def read_experiment(config: ConfigDict) -> Experiment:
    """Types a ConfigDict. Raises ConfigError naming the first key that is unknown, missing or wrong."""
    return _read(Experiment, config.to_dict(), "")


def write_config(config: ConfigDict, workdir: Path) -> None:
    """Writes `workdir`/config.json, or raises ConfigError if the folder belongs to another configuration."""
    new = json.loads(config.to_json_best_effort())
    path = Path(workdir) / "config.json"
    if path.exists():
        try:
            old = json.loads(path.read_text())
        except ValueError:
            raise ConfigError(f"{path} cannot be parsed: choose another --workdir") from None
        if old != new:
            raise ConfigError(
                f"{workdir} holds a run of another configuration ({_difference(old, new)}); "
                "choose another --workdir or remove it"
            )
        return
    write_json(path, new)


def parse_arg(arg: str | None, **defaults: bool | str) -> Any:
    """Reads "switch,name=value" behind a config file's colon. Raises ValueError for what there is none of.

    `defaults`: False for a switch, a text for a value.
    """
    out = dict(defaults)
    for part in filter(None, (arg or "").split(",")):
        name, equals, value = part.partition("=")
        if name not in out or isinstance(out[name], str) != bool(equals):
            there = [name if value is False else f"{name}=..." for name, value in defaults.items()]
            raise ValueError(f"unknown config argument {part!r}; there are: {', '.join(there)}")
        out[name] = value if equals else True
    return types.SimpleNamespace(**out)


def _read(kind: Any, value: Any, place: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _read_fields(kind, value, place)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        good = value in args
    elif origin is tuple:
        good = isinstance(value, tuple | list) and len(value) > 0
        return (
            tuple(_read(args[0], x, place) for x in value) if good else _refuse(kind, value, place)
        )
    elif origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        return _read(next(a for a in args if a is not type(None)), value, place)
    elif kind is float:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        value = float(value) if good else value
        if good and not math.isfinite(value):
            raise ConfigError(f"{place.rstrip('.')} = {value} is not finite")
    else:
        good = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
    return value if good else _refuse(kind, value, place)


def _read_fields(kind: Any, value: Any, place: str) -> Any:
    if not isinstance(value, Mapping):
        _refuse(kind, value, place)
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    unknown = [key for key in value if key not in fields]
    if unknown:
        raise ConfigError(f"unknown key {place}{unknown[0]}; there are: {', '.join(fields)}")
    missing = [
        name for name, f in fields.items() if name not in value and f.default is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"the configuration lacks {place}{missing[0]}")
    read = {key: _read(hints[key], item, f"{place}{key}.") for key, item in value.items()}
    try:
        return kind(**read)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{place.rstrip('.')}: {error}") from error


def _refuse(kind: Any, value: Any, place: str):
    wanted = getattr(kind, "__name__", str(kind)) if not typing.get_args(kind) else str(kind)
    raise ConfigError(f"{place.rstrip('.')} = {value!r} is not {wanted}")


def _difference(old: Any, new: Any, place: str = "") -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                return _difference(old.get(key), new.get(key), f"{place}.{key}".lstrip("."))
    return f"{place}: {old!r} there, {new!r} here"
