"""The train-inference gap taken apart: exact tokens or not, replayed routing or not, engine in float32 or bfloat16.

python launch/sweep.py --config=configs/ablation_gap.py --out=runs/gap --parallel=2     30 runs, each on an SGLang engine
notebooks/ablation_gap.ipynb                                                            the table and the figures

Every run is the tiny policy for six steps of 64 trials, of which the last four move it. Histories as in
t1jax/agent/history.py, with one of two chat templates:

    tokens                 exact ids (TITO)
    retokenized, keeps     the template repeats what came before: only the encoding of replies may differ
    stitched, drops        the template leaves out the (empty) thoughts of past replies, as Qwen 3.5's does; exact ids
                           of replies, but behind a history that the sampler did not see any more
    retokenized, drops     the same template, and what is trained on is how its last prompt was encoded

The first two, with routing replayed (R3) or free, are the 2x2 of T1; the others run in float32 alone. Half an hour on two CPU cores, most of it the
engines' starts.
"""

from ml_collections import ConfigDict

from configs import tiny
from t1jax.experiment import parse_arg

KEEPS = f"{tiny.ASSETS}/chat_template_keeps.jinja"
DROPS = f"{tiny.ASSETS}/chat_template_drops.jinja"
SETTINGS = (  # history, template, replay
    ("tokens", "", True),
    ("tokens", "", False),
    ("retokenized", KEEPS, True),
    ("retokenized", KEEPS, False),
    ("stitched", DROPS, True),
    ("retokenized", DROPS, True),
)
# nats between trainer and engine that still count as the same weights; in bfloat16 this policy is off by one
TOLERANCE = {"float32": 1e-3, "bfloat16": 5.0}


def get_config(arg: str = "") -> ConfigDict:
    """`arg` "debug": two steps of 16 trials with the embedded sampler."""
    a = parse_arg(arg, debug=False)
    c = tiny.get_config("" if a.debug else "sampler=sglang")
    c.train.parity_band = 1000.0  # nats: the gap is what is measured here
    c.train.flips_every = 1
    c.evaluate.update(before=False, after=False)
    c.train.update(steps=6, warmup_steps=2)
    if a.debug:
        c.rollout.update(trials=16, concurrency=16)
        c.ppo.microbatch = 8
        c.train.update(steps=2, warmup_steps=1)
    return c


def sweep(add) -> None:
    for seed in (0, 1, 2):
        for dtype, tolerance in TOLERANCE.items():
            for history, template, replay in SETTINGS[: None if dtype == "float32" else 4]:
                add(
                    **{
                        "seed": seed,
                        "fleet.server.dtype": dtype,
                        "fleet.probe_tolerance": tolerance,
                        "episode.history": history,
                        "chat_template": template,
                        "ppo.replay": replay,
                    }
                )
