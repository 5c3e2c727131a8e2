"""t1jax: reinforcement learning of Mixture-of-Experts terminal agents in JAX."""
