"""The devices of a run. Axis "data": the rows of a batch, each row on one device.

A CPU counts as several devices: XLA:CPU runs most operations of a small model on one core, so a device for
each core is the way to use them all.
"""

import contextlib
import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class MeshError(RuntimeError):
    """The machine has too few devices; the message is one line."""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    data: int


def make_mesh(config: MeshConfig) -> Mesh:
    """Call it before anything else touches a device. Raises MeshError where there are too few."""
    with contextlib.suppress(RuntimeError):  # devices in use are as many as they are
        jax.config.update("jax_num_cpu_devices", max(config.data, jax.config.jax_num_cpu_devices))
    devices = jax.devices()
    if len(devices) < config.data:
        raise MeshError(
            f"mesh.data={config.data} needs as many devices, {devices[0].platform} has {len(devices)}: "
            f"pass --config.mesh.data={len(devices)}"
        )
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((config.data,), ("data",), auto, devices=devices[: config.data])


def replicate(tree: Any, mesh: Mesh) -> Any:
    """The tree on every device of the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))
