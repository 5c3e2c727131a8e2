"""New weights to the sampler, between batches: no reply spans two versions."""

from t1jax.types import Engine


def publish(params: dict, version: int, sampler: Engine) -> None:
    """Loads `params` as `version`; everything cached under older weights is forgotten.

    Raises RuntimeError while a request is in flight, or where the sampler does not report the version.
    """
    sampler.load(params, version)
    if sampler.version != version:
        raise RuntimeError(f"published version {version}, the sampler reports {sampler.version}")
