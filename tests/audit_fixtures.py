"""Real runs of the tiny policy, and what an audit reads of them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from t1jax.audit import check_step, read_config, read_pool
from t1jax.recompute import check_inferred, make_recompute
from t1jax.rollout import store
from t1jax.run import make_chat
from t1jax.types import Trajectory

ROOT = Path(__file__).parent.parent
ENV = os.environ | {
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
    "JAX_PLATFORMS": "cpu",
}
SFT_POLICY = {
    "initial_policy": "configs/assets/tiny/sft",
    "model.num_layers": 4,
    "model.hidden_size": 64,
    "model.num_experts": 8,
    "train.checkpoint_every": 2,
    "evaluate.before": False,
    "evaluate.after": False,
}


def start(module: str, *arguments) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT,
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def train(workdir: Path, **changes) -> subprocess.Popen:
    flags = [f"--config.{name}={value}" for name, value in (SFT_POLICY | changes).items()]
    return start("t1jax.train", "--config=configs/tiny.py:debug", f"--workdir={workdir}", *flags)


def finish(process: subprocess.Popen) -> tuple[str, str]:
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    return out, err


class Recorded:
    """A run, open for changes of what was read of it."""

    def __init__(self, run: Path):
        self.run = run
        self.experiment = read_config(run)
        self.chat = make_chat(self.experiment)
        self.pool = read_pool(self.experiment, run)
        self.recompute = make_recompute(self.experiment, run)

    def changed(self, step: int, change) -> list[Trajectory]:
        """The step, with its first trial of several turns changed."""
        stored = store.read_step(self.run / "trajectories", step)
        scored = [i for i, t in enumerate(stored) if len(t.turns) > 1 and t.reward is not None]
        stored[scored[0]] = change(stored[scored[0]])
        return stored

    def check(self, step: int, trajectories: list[Trajectory]) -> bool:
        """As audit_run does; whether the weights were there."""
        check_step(self.experiment, self.chat, self.pool, step, trajectories)
        rows = [t for t in trajectories if t.turns and t.reward is not None]
        again = self.recompute(step, rows)
        inferred = store.read_advantages(self.run / "advantages", step)
        check_inferred(self.experiment, rows, inferred, again)
        return bool(again)


def copied(run: Path, tmp_path: Path) -> Path:
    """A copy whose files may be replaced, not written to."""
    return shutil.copytree(run, tmp_path / "run", copy_function=os.link)
