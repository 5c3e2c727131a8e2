"""A tiny Qwen3.5-MoE policy on generated tasks in the embedded sandbox: minutes on two CPU cores.

python -m t1jax.sft   --config=configs/tiny.py --workdir=runs/sft        the shipped SFT checkpoint
python -m t1jax.train --config=configs/tiny.py --workdir=runs/demo       what launch/demo.sh runs
python -m t1jax.train --config=configs/tiny.py:debug --workdir=runs/try  four steps, a minute
python -m t1jax.train --config=configs/tiny.py:sampler=sglang ...        on an SGLang engine (see README)
"""

from ml_collections import ConfigDict

from t1jax.experiment import parse_arg

ASSETS = "configs/assets/tiny"


def get_config(arg: str = "") -> ConfigDict:
    """`arg` "debug": the same run, small enough to try a change with; "sampler=sglang": on an SGLang engine."""
    a = parse_arg(arg, debug=False, sampler="jax")
    c = ConfigDict()
    c.seed = 0
    c.tokenizer = f"{ASSETS}/tokenizer.json"
    c.chat_template = ""  # a .jinja or tokenizer_config.json; "" = ChatML as Qwen writes it
    c.initial_policy = f"{ASSETS}/sft"  # the SFT checkpoint PPO starts from; "" = random weights
    c.model = dict(
        vocab_size=512,
        hidden_size=64,
        num_layers=4,
        full_attention_interval=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        delta_k_heads=2,
        delta_v_heads=4,
        delta_k_dim=32,
        delta_v_dim=16,
        num_experts=8,
        experts_per_token=2,
        expert_width=32,
        shared_width=32,
        embed_std=1.0,
    )
    c.mesh = dict(data=2)  # devices; on a CPU, one for each core
    c.tasks = dict(
        train="",  # a folder of Harbor tasks; "" = generate `train_count` of them
        eval="",
        preflight="",  # a file that t1jax.preflight made: tasks that are unfit are left out
        train_count=2048,
        eval_count=256,
        seed=0,
    )
    c.sandbox = dict(
        kind="namespace",
        docker=dict(
            hosts=("unix:///var/run/docker.sock",),
            containers=64,
            starts_per_s=4.0,
            attempts=4,
            processes=256,
            network="t1jax",
            fresh_verifier=True,
        ),
    )
    c.episode = dict(
        protocol="bash",
        history="tokens",
        max_turns=6,
        max_context=192,
        max_reply=32,
        compact_below=0,  # free tokens below which the context is summarized; 8,000 for a real model
        max_summary=0,
        command_timeout_s=10.0,
        turn_timeout_s=50.0,
        agent_timeout_s=60.0,
        trial_timeout_s=90.0,
        max_output_bytes=200,  # the context is 192 tokens; 10,000 for a real model
    )
    c.rollout = dict(
        trials=64,  # a step
        concurrency=64,
        max_attempts=3,
        max_infra_share=0.25,
        sampling=dict(temperature=1.0, top_p=1.0, top_k=0),
    )
    c.engine = dict(kind=a.sampler, slots=64, prefill_rows=8, prefill_buckets=(16, 64))
    c.fleet = dict(  # with engine.kind="sglang"
        server=dict(
            python=".venv-sglang/bin/python",
            device="cpu",
            dtype="float32",
            max_running=64,
            max_tokens=16384,
            start_timeout_s=300.0,
            flags="",
        ),
        engines=1,
        urls="",
        transfer="disk",  # "tensors": without files, see rollout/fleet.py
        bucket_bytes=256 * 2**20,
        reply_timeout_s=40.0,
        control_timeout_s=60.0,
        load_timeout_s=600.0,
        probe_period_s=10.0,
        probe_timeout_s=5.0,
        probe_failures=3,
        starts_per_s=100.0,
        burst=64,
        probe_tolerance=1e-3,  # nats; 0.5 where the servers compute in bfloat16
    )
    c.reward = dict(kind="dense", scale=20.0)
    c.ppo = dict(
        clip_low=0.2,
        clip_high=0.2,
        value_clip=0.2,
        gamma=1.0,
        lam=1.0,
        replay=True,
        whiten=False,
        reduction="token",
        microbatch=16,  # rows on each device
    )
    c.actor_optim = dict(
        lr=4e-4, warmup_steps=0, clip_norm=1.0, b1=0.9, b2=0.98, eps=1e-8, weight_decay=0.1
    )
    c.critic_optim = dict(
        lr=1.5e-3, warmup_steps=0, clip_norm=1.0, b1=0.9, b2=0.98, eps=1e-8, weight_decay=0.1
    )
    c.train = dict(
        steps=60,
        warmup_steps=8,  # critic only, before the first policy update
        buckets=(144, 192),  # lengths of the training rows
        checkpoint_every=10,
        checkpoint_keep=2,
        parity_band=1e-4,  # largest engine gap in nats before the run stops
        flips_every=10,
    )
    c.evaluate = dict(
        attempts=1, sampling=dict(temperature=1.0, top_p=1.0, top_k=0), before=True, after=True
    )
    c.sft = dict(
        trajectories="",  # a folder of ATIF documents (*.json); "" = scripts on generated tasks
        tasks=6144,
        oracle_share=0.35,  # the rest imitates flawed scripts
        row_length=256,  # tokens a training row, into which trials are packed
        batch=32,
        steps=1000,
        copy_steps=200,  # first: short sequences of names to be copied
        learning_rate=3e-3,
        checkpoint_every=500,
    )
    if a.sampler == "sglang":
        c.train.parity_band = 1e-3  # the same numbers, summed in another order
    if a.debug:
        c.initial_policy = ""
        c.model.update(num_layers=2, hidden_size=32, num_experts=4)
        c.tasks.update(train_count=64, eval_count=16)
        c.rollout.update(trials=16, concurrency=16)
        c.engine.update(slots=16)
        c.ppo.update(microbatch=8)
        c.train.update(steps=4, warmup_steps=1, buckets=(192,), checkpoint_every=2)
        c.sft.update(tasks=64, batch=8, steps=20, copy_steps=5, checkpoint_every=10)
    return c


def sweep(add) -> None:
    """What one would vary first."""
    for seed in (0, 1, 2):
        for rate in (2e-4, 4e-4, 6e-4):
            add(**{"seed": seed, "actor_optim.lr": rate})
