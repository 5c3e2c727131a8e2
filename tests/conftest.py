"""Test set-up: CPU, strict rank promotion, and the persistent compilation cache that keeps tests fast."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
