"""The other side: transformers in its own process, on the same random weights."""

import contextlib
import functools
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from t1jax.experiment import ConfigError
from t1jax.model.config import ModelConfig
from t1jax.model.hf import by_path, export_params
from t1jax.model.lm import init_policy

MODEL = ModelConfig(
    vocab_size=2048,
    hidden_size=128,
    num_layers=8,
    full_attention_interval=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    delta_k_heads=4,
    delta_v_heads=8,
    delta_k_dim=32,
    delta_v_dim=32,
    num_experts=16,
    experts_per_token=4,
    expert_width=64,
    shared_width=64,
    logp_chunk=512,
)
EXPERTS = (
    "grouped_mm",
    "eager",
)  # transformers' ways, of which the faster counts; batched_mm is left out
PYTHON = Path(".venv-reference/bin/python")


class Reference:
    """transformers in its own process and environment: see launch/reference_bench.py."""

    def __init__(self, checkpoint: Path, threads: int):
        if not PYTHON.exists():
            raise ConfigError(f"{PYTHON} is missing: run bash launch/setup.sh --reference")
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by `close`)
        self._process = subprocess.Popen(
            [PYTHON, "launch/reference_bench.py", checkpoint, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def ways(self, **request) -> list[Callable[[], float]]:
        """The ways to do a request, for `take_turns`."""
        return [functools.partial(self.seconds, experts=way, **request) for way in EXPERTS]

    def seconds(self, **request) -> float:
        """What the request took there; raises ConfigError where it failed."""
        line = ""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": self._last_words()}
        if "error" in answer:
            raise ConfigError(f"transformers: {answer['error']}")
        return answer["seconds"]

    def close(self) -> None:
        with self._process, self._errors:
            self._process.kill()

    def _last_words(self) -> str:
        self._errors.seek(0)
        return (self._errors.read().strip() or "the process ended").splitlines()[-1]


@contextlib.contextmanager
def side_by_side() -> Iterator[tuple[dict, Path, Reference]]:
    """The same random weights here, in a Hugging Face folder, and there."""
    if jax.default_backend() != "cpu":
        raise ConfigError("transformers runs on the CPU here: set JAX_PLATFORMS=cpu")
    params = init_policy(MODEL, jax.random.key(0))
    with tempfile.TemporaryDirectory() as folder:
        export_params(by_path(params), MODEL, Path(folder))
        reference = Reference(Path(folder), os.cpu_count())
        try:
            yield params, Path(folder), reference
        finally:
            reference.close()
