"""What the mains build alike from an Experiment: task pools, sampler, collector settings, first state."""

import sys
from collections.abc import Iterator
from pathlib import Path

import grain
import jax
import numpy as np
from jax.sharding import Mesh

from t1jax.agent.chat import Chat
from t1jax.agent.fitness import fit_tasks, read_lines
from t1jax.agent.generate import Split, generate
from t1jax.agent.task import load_tasks
from t1jax.agent.template import TemplateError
from t1jax.checkpoint import load_params
from t1jax.engine import JaxSampler
from t1jax.experiment import ConfigError, Experiment
from t1jax.mesh import replicate
from t1jax.model.hf import by_path, export_params, export_tensors
from t1jax.model.hf_config import hf_sizes
from t1jax.model.lm import init_policy, init_value, token_logp
from t1jax.ppo.optim import make_optimizer
from t1jax.ppo.step import TrainState, init_state
from t1jax.rollout.collect import CollectConfig
from t1jax.rollout.fleet import Fleet
from t1jax.rollout.sglang import EngineModel, Settings
from t1jax.types import Engine, Sampling, Task


def load_pool(experiment: Experiment, split: Split, workdir: Path) -> list[Task]:
    """The configured folder's tasks, or generated ones, which are written into `workdir`/tasks."""
    tasks = experiment.tasks
    folder = tasks.train if split == "train" else tasks.eval
    if folder:
        loaded = load_tasks(Path(folder))
        if split == "eval" or not tasks.preflight:
            return loaded
        found = Path(tasks.preflight)
        pool = fit_tasks(loaded, read_lines(found.read_text(), found), found)
        print(
            f"left out {len(loaded) - len(pool)} of {len(loaded)} tasks as unfit", file=sys.stderr
        )
        return pool
    count = tasks.train_count if split == "train" else tasks.eval_count
    generate(workdir / "tasks" / split, split, count, tasks.seed)
    return load_tasks(workdir / "tasks" / split)


def shuffle_pool(pool: list[Task], seed: int) -> grain.MapDataset:
    """Endless tasks, each epoch in an order of its own; item i is a function of (pool, seed, i)."""
    return grain.MapDataset.source(pool).seed(seed).shuffle().repeat()


def make_chat(experiment: Experiment) -> Chat:
    """The tokenizer; raises ConfigError where it cannot be read, or it and the model disagree."""
    if not Path(experiment.tokenizer).is_file():
        raise ConfigError(
            f"tokenizer {experiment.tokenizer} does not exist: run from the project's root"
        )
    try:
        appends = experiment.episode.history == "tokens"
        chat = Chat(experiment.tokenizer, experiment.chat_template or None, appends)
    except TemplateError as error:
        raise ConfigError(f"chat_template {experiment.chat_template}: {error}") from error
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ConfigError(f"tokenizer {experiment.tokenizer} cannot be used: {error}") from error
    if chat.vocab_size > experiment.model.vocab_size:
        raise ConfigError(
            f"{experiment.tokenizer} has {chat.vocab_size} ids, model.vocab_size is "
            f"{experiment.model.vocab_size}"
        )
    return chat


def make_sampler(experiment: Experiment, chat: Chat, sampling: Sampling, folder: Path) -> Engine:
    """The configured engine; it has no weights yet. `folder`: for a fleet's logs and weights."""
    if experiment.engine.kind == "sglang":
        return make_fleet(experiment, chat, sampling, folder)
    engine = experiment.engine
    return JaxSampler(
        experiment.model,
        slots=engine.slots,
        max_len=experiment.episode.max_context,
        prefill_rows=engine.prefill_rows,
        prefill_buckets=engine.prefill_buckets,
        seed=experiment.seed,
        sampling=sampling,
        stop_ids=chat.stop_ids,
    )


def make_fleet(experiment: Experiment, chat: Chat, sampling: Sampling, folder: Path) -> Fleet:
    """SGLang servers of the policy. Their proof of a load is the trainer's log-probs of a probe."""
    model, fleet = experiment.model, experiment.fleet
    settings = Settings(
        stop_ids=chat.stop_ids,
        reply_timeout_s=fleet.reply_timeout_s,
        control_timeout_s=fleet.control_timeout_s,
    )
    served = EngineModel(hf_sizes(model), experiment.episode.max_context)
    score = jax.jit(token_logp, static_argnums=0)

    def export(params: dict, out: Path) -> None:
        export_params(by_path(params), model, out, dtype=fleet.server.dtype)

    def tensors(params: dict) -> Iterator[tuple[str, np.ndarray]]:
        return export_tensors(by_path(params), model, fleet.server.dtype)

    def probe(params: dict, tokens: np.ndarray) -> np.ndarray:
        row = tokens[None]
        place = np.arange(len(tokens), dtype=np.int32)[None], np.ones_like(row)
        found, _, _ = score(model, params, row, *place, None, np.ones(1, np.float32))
        return np.asarray(found)[0, 1:]

    return Fleet(fleet, served, settings, sampling, export, tensors, probe, folder)


def collect_config(experiment: Experiment, sampling: Sampling) -> CollectConfig:
    return CollectConfig(
        episode=experiment.episode,
        temperature=sampling.temperature,
        reward_kind=experiment.reward.kind,
        reward_scale=experiment.reward.scale,
        concurrency=experiment.rollout.concurrency,
        max_attempts=experiment.rollout.max_attempts,
        max_infra_share=experiment.rollout.max_infra_share,
        fresh_verifier=experiment.sandbox.fresh_verifier,
    )


def abstract_policy(experiment: Experiment) -> dict:
    """Shapes and dtypes of the policy's parameters."""
    return jax.eval_shape(lambda: init_policy(experiment.model, jax.random.key(0)))


def first_state(experiment: Experiment, mesh: Mesh) -> TrainState:
    """Step 0: the configured initial policy, its trunk under a zero value head, fresh optimizers."""
    policy_key, value_key = jax.random.split(jax.random.key(experiment.seed))
    if experiment.initial_policy:
        policy = load_params(Path(experiment.initial_policy), abstract_policy(experiment))
    else:
        policy = init_policy(experiment.model, policy_key)
    value = init_value(experiment.model, value_key, policy)
    actor, critic = make_optimizer(experiment.actor_optim), make_optimizer(experiment.critic_optim)
    return replicate(init_state(policy, value, actor, critic), mesh)
