import dataclasses
import math

import pytest

from configs import tiny
from t1jax.experiment import ConfigError, parse_arg, read_experiment, write_config


@pytest.mark.parametrize("arg", ["", "debug"])
def test_the_tiny_config_builds(arg):
    experiment = read_experiment(tiny.get_config(arg))
    assert experiment.model.vocab_size == 512
    assert dataclasses.asdict(experiment)["ppo"]["clip_low"] == 0.2


def test_every_sweep_point_resolves():
    points = []
    tiny.sweep(lambda **changes: points.append(changes))
    assert len(points) == 9
    for changes in points:
        config = tiny.get_config()
        config.lock()
        config.update_from_flattened_dict(changes)
        assert read_experiment(config).seed == changes["seed"]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ppo.clip_lo", 0.1, "unknown key ppo.clip_lo"),
        ("train.steps", "many", "train.steps = 'many' is not int"),
        ("train.steps", True, "train.steps = True is not int"),
        ("reward.kind", "best", "reward.kind = 'best' is not"),
        ("rollout.sampling.top_p", 0.9, "top_p = 1"),
        ("rollout.sampling.temperature", 0.0, "rollout.sampling: temperature 0.0 is not positive"),
        (
            "episode.command_timeout_s",
            55.0,
            "command_timeout_s=55 must be below turn_timeout_s=50",
        ),
        ("episode.turn_timeout_s", 60.0, "turn_timeout_s=60 must be below agent_timeout_s=60"),
        ("episode.trial_timeout_s", 45, "agent_timeout_s=60 must be below trial_timeout_s=45"),
        ("episode.trial_timeout_s", 0.0, "episode.trial_timeout_s = 0.0 must be positive"),
        ("episode.compact_below", -1, "episode.compact_below = -1 must not be negative"),
        ("episode.compact_below", 64, "episode: compact_below=64 free tokens must hold max_reply"),
        ("ppo.microbatch", 7, "must divide"),
        ("episode.max_context", 4096, "does not fit"),
        ("model.num_layers", 3, "model: num_layers=3 must be a multiple"),
        ("train.buckets", (), "train.buckets = () is not"),
        ("train.buckets", (0, 192), "train.buckets must hold positive"),
        ("seed", -1, "must not be negative"),
        ("ppo.microbatch", 0, "ppo.microbatch = 0 must be positive"),
        ("rollout.concurrency", 0, "rollout.concurrency = 0 must be positive"),
        ("rollout.concurrency", 65, "exceeds engine.slots"),
        ("train.checkpoint_every", 0, "train.checkpoint_every = 0 must be positive"),
        ("evaluate.sampling.top_p", 0.0, "evaluate.sampling: top_p=0.0"),
        ("episode.history", "stitched", "renders a chat_template: name one"),
        ("engine.prefill_rows", 0, "engine.prefill_rows = 0 must be positive"),
        ("model.num_experts", 0, "model: num_experts=0 must be at least 1"),
        ("sft.row_length", 64, "sft.row_length must hold"),
        ("ppo.gamma", 1.5, "ppo.gamma = 1.5 must lie in 0..1"),
        ("ppo.lam", -0.1, "ppo.lam = -0.1 must lie in 0..1"),
        ("rollout.max_infra_share", 0.0, "rollout.max_infra_share = 0.0 must be positive"),
        ("rollout.max_infra_share", 1.1, "rollout.max_infra_share = 1.1 must lie in 0..1"),
        ("train.parity_band", 0.0, "train.parity_band = 0.0 must be positive"),
        ("train.parity_band", math.inf, "train.parity_band = inf is not finite"),
        ("ppo.clip_low", math.nan, "ppo.clip_low = nan is not finite"),
        ("ppo.clip_low", -0.2, "ppo.clip_low = -0.2 must not be negative"),
        ("actor_optim.lr", -math.inf, "actor_optim.lr = -inf is not finite"),
        ("critic_optim.lr", -1e-3, "critic_optim.lr = -0.001 must not be negative"),
        ("actor_optim.clip_norm", 0, "actor_optim.clip_norm = 0.0 must be positive"),
        ("critic_optim.b2", 1.0, "critic_optim.b2 = 1.0 must be at least 0 and below 1"),
        ("model.embed_std", math.nan, "model.embed_std = nan is not finite"),
        ("rollout.sampling.temperature", math.inf, "rollout.sampling.temperature = inf is not"),
        ("fleet.server.start_timeout_s", math.inf, "fleet.server.start_timeout_s = inf is not"),
    ],
)
def test_a_wrong_value_is_named(key, value, message):
    config = tiny.get_config()
    with config.unlocked(), config.ignore_type():
        config.update_from_flattened_dict({key: value})
    with pytest.raises(ConfigError, match=message.replace("(", r"\(").replace(")", r"\)")):
        read_experiment(config)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("fleet.probe_period_s", 30.0, "a hung engine after 105 s and reply_timeout_s=40; both"),
        ("fleet.reply_timeout_s", 50.0, "reply_timeout_s=50; both must be below episode.turn"),
        ("rollout.concurrency", 65, "exceeds fleet.server.max_running=64 on 1 engines"),
        ("fleet.server.max_tokens", 197, "does not hold one stream of episode.max_context=192"),
        ("fleet.server.flags", '"a', """fleet.server: flags='"a': No closing quotation"""),
        ("fleet.server.flags", "--port=3", "fleet.server: flags='--port=3': --port is set by"),
        ("fleet.urls", "localhost:3", "fleet: urls: 'localhost:3' is not http://HOST:PORT"),
        ("fleet.urls", "http://a:1 http://a:1/", "fleet: urls: http://a:1 is there twice"),
    ],
)
def test_a_wrong_value_of_a_fleet_is_named(key, value, message):
    config = tiny.get_config("sampler=sglang")
    read_experiment(config)
    config.update_from_flattened_dict({key: value})
    with pytest.raises(ConfigError, match=message):
        read_experiment(config)


def test_a_fleet_has_the_places_of_all_its_engines():
    config = tiny.get_config("sampler=sglang")
    config.rollout.concurrency = 128
    config.fleet.urls = "http://a:1 http://[::1]:30000/"
    assert read_experiment(config).fleet.count == 2


@pytest.mark.parametrize("share", [0, 1.0])
def test_bounds_belong_to_their_range(share):
    config = tiny.get_config()
    config.ppo.update(gamma=share, lam=share, clip_low=share, value_clip=None)
    config.rollout.max_infra_share = 1.0
    assert read_experiment(config).ppo.gamma == share


def test_a_missing_key_is_named():
    config = tiny.get_config()
    del config.ppo["gamma"]
    with pytest.raises(ConfigError, match=r"lacks ppo\.gamma"):
        read_experiment(config)


def test_a_folder_keeps_to_one_configuration(tmp_path):
    config = tiny.get_config()
    write_config(config, tmp_path)
    write_config(config, tmp_path)
    config.seed = 5
    with pytest.raises(ConfigError, match="seed: 0 there, 5 here"):
        write_config(config, tmp_path)


def test_arguments_of_a_config_file():
    assert parse_arg("debug", debug=False, wide=False).debug is True
    assert parse_arg(None, debug=False).debug is False
    a = parse_arg("sampler=sglang,debug", debug=False, sampler="jax")
    assert (a.debug, a.sampler) == (True, "sglang")
    for wrong in ("dbug", "debug=1", "sampler", "sample=x"):
        with pytest.raises(ValueError, match=f"'{wrong}'; there are: debug, sampler=..."):
            parse_arg(wrong, debug=False, sampler="jax")
