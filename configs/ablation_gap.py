"""The train-inference gap taken apart: exact tokens or not, replayed routing or not, engine in float32 or bfloat16.

python launch/sweep.py --config=configs/ablation_gap.py --out=runs/gap     36 runs, each on an SGLang engine
notebooks/ablation_gap.ipynb                                              the table and the figures

Every run is the tiny policy for six steps of 64 trials, of which the last four move it. Three histories (see
t1jax/agent/history.py): "tokens" is exact, "stitched" and "retokenized" render the chat template anew each turn,
which drops the thoughts of past replies as Qwen 3.5's does. Routing is replayed (R3) or free. About two minutes a run
on two CPU cores, most of it the engine's start.
"""

from ml_collections import ConfigDict

from configs import tiny
from t1jax.experiment import parse_arg

TEMPLATE = f"{tiny.ASSETS}/chat_template.jinja"


def get_config(arg: str = "") -> ConfigDict:
    """`arg` "debug": two steps of 16 trials with the embedded sampler."""
    a = parse_arg(arg, debug=False)
    c = tiny.get_config("" if a.debug else "sampler=sglang")
    c.chat_template = TEMPLATE
    c.episode.history = "stitched"
    c.train.parity_band = 1000.0  # nats: the gap is what is measured here
    c.train.flips_every = 1
    c.fleet.probe_tolerance = 5.0  # nats: an engine in bfloat16 is off by more than one
    c.evaluate.update(before=False, after=False)
    c.train.update(steps=6, warmup_steps=2)
    if a.debug:
        c.rollout.update(trials=16, concurrency=16)
        c.ppo.microbatch = 8
        c.train.update(steps=2, warmup_steps=1)
    return c


def sweep(add) -> None:
    for seed in (0, 1, 2):
        for dtype in ("float32", "bfloat16"):
            for history in ("tokens", "stitched", "retokenized"):
                for replay in (True, False):
                    add(
                        **{
                            "seed": seed,
                            "fleet.server.dtype": dtype,
                            "episode.history": history,
                            # The template cannot be appended to; without one, the same text can.
                            "chat_template": "" if history == "tokens" else TEMPLATE,
                            "ppo.replay": replay,
                        }
                    )
