import os
import shutil
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from t1jax.checkpoint import CheckpointError, Checkpoints, load_params, save_params


@struct.dataclass
class State:
    step: jax.Array
    params: dict
    moments: tuple
    rng: jax.Array


def make_state(seed):
    key = jax.random.key(seed)
    return State(
        step=jnp.int32(seed),
        params={"layer": {"w": jax.random.normal(key, (3, 5)), "b": jnp.ones(5, jnp.bfloat16)}},
        moments=(jnp.arange(4, dtype=jnp.uint8), jnp.array(True)),
        rng=key,
    )


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)


def save_steps(folder, steps, keep=3):
    room = Checkpoints(folder, keep)
    for step in steps:
        room.save(step, make_state(step), {"trial": 7 * step})
    return room


def test_restores_the_latest_state_leaf_by_leaf(tmp_path):
    save_steps(tmp_path, [10, 20])
    found = Checkpoints(tmp_path, 3).restore(jax.eval_shape(lambda: make_state(0)))
    assert (found.step, found.host) == (20, {"trial": 140})
    assert_same(found.state, make_state(20))


def test_an_empty_room_has_nothing_to_restore(tmp_path):
    assert Checkpoints(tmp_path, 1).restore(make_state(0)) is None


def test_keeps_the_last_ones(tmp_path):
    room = save_steps(tmp_path, [1, 2, 3, 4], keep=2)
    assert room.steps() == [3, 4]
    assert sorted(os.listdir(tmp_path)) == ["000003", "000004"]


def test_saving_a_step_again_replaces_it(tmp_path):
    room = save_steps(tmp_path, [1])
    room.save(1, make_state(5), {})
    assert_same(room.restore(make_state(0)).state, make_state(5))


@pytest.mark.parametrize(
    "name", ["host.json", "arrays/_METADATA", "arrays/manifest.ocdbt", "largest"]
)
@pytest.mark.parametrize("how", ["flipped", "cut", "removed"])
def test_damage_is_named_and_never_skipped(tmp_path, name, how):
    save_steps(tmp_path, [10, 20])
    path = tmp_path / "000020" / name
    if name == "largest":
        files = [file for file in (tmp_path / "000020/arrays").rglob("*") if file.is_file()]
        path = max(files, key=lambda file: file.stat().st_size)
    data = bytearray(path.read_bytes())
    if how == "removed":
        path.unlink()
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data if how == "flipped" else data[:-1])
    with pytest.raises(CheckpointError) as error:
        Checkpoints(tmp_path, 3).restore(make_state(0))
    message = str(error.value)
    assert path.name in message and "\n" not in message
    assert f"remove {tmp_path}/000020 to go on from step 10" in message
    shutil.rmtree(tmp_path / "000020")
    assert Checkpoints(tmp_path, 3).restore(make_state(0)).step == 10


@pytest.mark.parametrize("text", [None, "", "{", "[]"])
def test_a_damaged_manifest_is_named(tmp_path, text):
    save_steps(tmp_path, [10])
    path = tmp_path / "000010" / "manifest.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest.json .*go on from the beginning"):
        Checkpoints(tmp_path, 3).restore(make_state(0))


def test_what_a_killed_writer_left_is_swept_away(tmp_path):
    save_steps(tmp_path, [10])
    (tmp_path / "tmp-000020" / "arrays").mkdir(parents=True)
    room = Checkpoints(tmp_path, 3)
    assert os.listdir(tmp_path) == ["000010"] and room.steps() == [10]


def test_a_failed_write_leaves_the_earlier_checkpoint_alone(tmp_path):
    room = save_steps(tmp_path, [10])
    with pytest.raises(ValueError):
        room.save(20, make_state(20), {"reward": float("nan")})  # no JSON
    assert os.listdir(tmp_path) == ["000010"]
    assert_same(room.restore(make_state(0)).state, make_state(10))


FULL_DISK = """
    import sys, jax, jax.numpy as jnp, os
    from pathlib import Path
    from t1jax.checkpoint import Checkpoints, CheckpointError
    room = Checkpoints(Path(sys.argv[1]), keep=5)
    tree = {"w": jax.random.normal(jax.random.key(0), (300_000,))}
    for step in range(5):
        try:
            room.save(step, tree, {})
        except CheckpointError as error:
            assert room.steps() == list(range(step)) and step > 0, os.listdir(sys.argv[1])
            assert sorted(os.listdir(sys.argv[1])) == [f"{s:06d}" for s in range(step)]
            assert room.restore(tree).step == step - 1
            raise SystemExit(f"told: {error}")
"""


def test_a_full_disk_is_told_in_one_line_and_leaves_nothing(tmp_path):
    mount = f'mount -t tmpfs -o size=3500k tmpfs {tmp_path} && exec "$@"'
    command = ["unshare", "-Urm", "sh", "-c", mount, "sh"]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.fail("needs a user namespace to mount a small disk")
    script = [sys.executable, "-c", textwrap.dedent(FULL_DISK), str(tmp_path)]
    done = subprocess.run([*command, *script], capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"told: cannot write checkpoint {tmp_path}/00000")
    assert "No space left on device" in line


def test_weights_round_trip_and_replace(tmp_path):
    for seed in (1, 2):
        save_params(tmp_path / "sft", make_state(seed).params, {})
    assert_same(load_params(tmp_path / "sft", make_state(0).params), make_state(2).params)
    assert os.listdir(tmp_path) == ["sft"]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda p: p | {"extra": jnp.ones(2)}, r"extra is missing in it, expected float32\[2\]"),
        (
            lambda p: {"layer": {"w": p["layer"]["w"]}},
            r"layer/b is bfloat16\[5\] in it, expected no such",
        ),
        (
            lambda p: {"layer": p["layer"] | {"w": jnp.ones((5, 3))}},
            r"layer/w is float32\[3, 5\] in it, expected float32\[5, 3\]",
        ),
        (
            lambda p: {"layer": p["layer"] | {"w": p["layer"]["w"].astype(jnp.bfloat16)}},
            r"layer/w is float32\[3, 5\] in it, expected bfloat16\[3, 5\]",
        ),
    ],
)
def test_weights_of_another_model_are_refused(tmp_path, change, message):
    params = make_state(1).params
    save_params(tmp_path / "sft", params, {})
    with pytest.raises(CheckpointError, match=message):
        load_params(tmp_path / "sft", change(params))


def test_missing_weights_are_told(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        load_params(tmp_path / "nowhere", {})


def test_a_checkpoint_is_small(tmp_path):
    params = {f"w{i}": jax.random.normal(jax.random.key(i), (100, 100)) for i in range(70)}
    save_params(tmp_path / "sft", params, {})
    files = [path for path in (tmp_path / "sft").rglob("*") if path.is_file()]
    assert len(files) <= 24
    assert sum(path.stat().st_size for path in files) < 4_000_000


SAVE_SHARDED = """
    import sys, jax, jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec
    from pathlib import Path
    from t1jax.checkpoint import save_params
    sharding = NamedSharding(jax.make_mesh((8,), ("data",)), PartitionSpec("data"))
    save_params(Path(sys.argv[1]), {"w": jax.device_put(jnp.arange(16.0), sharding)}, {})
"""


def test_what_eight_devices_saved_one_restores(tmp_path):
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    script = [sys.executable, "-c", textwrap.dedent(SAVE_SHARDED), str(tmp_path / "sft")]
    subprocess.run(script, check=True, env=os.environ | flags)
    tree = load_params(tmp_path / "sft", {"w": jax.ShapeDtypeStruct((16,), jnp.float32)})
    assert tree["w"].sharding == jax.sharding.SingleDeviceSharding(jax.devices()[0])
    np.testing.assert_array_equal(tree["w"], np.arange(16.0))
