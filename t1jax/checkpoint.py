"""Checkpoints on disk: trees of arrays through Orbax, whole or not there at all.

A checkpoint is a folder:
    arrays/        the tree, written by Orbax
    host.json      what the host needs beside it (task iterator, counters, offsets)
    manifest.json  the shape and dtype of every leaf, and the sha256 of every file

It is written under a name beginning with "tmp-", synced, and renamed: a crash or a full disk leaves no
half checkpoint under a real name. Reading checks the manifest first, so damage is named, not loaded.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import absl.logging
import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint import type_handlers

FORMAT = 1
TMP = "tmp-"
RESTORE = "restore it from where it came, or write it anew"
CHUNK_BYTES = 2**23
CONCURRENT_BYTES = 2**26  # under way to the disk at one time

# Orbax's threads log each failed write with tracebacks of their own, before or after it is raised here.
absl.logging.get_absl_logger().addFilter(
    lambda record: not (record.exc_info and "/orbax/" in record.pathname)
)


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message is one line and says what to do."""


class Checkpoint(NamedTuple):
    """What `Checkpoints.restore` found."""

    step: int
    state: Any
    host: dict


class Checkpoints:
    """The checkpoints of one run, `folder`/<step>, of which the last `keep` stay.

    One writer at a time: opening it removes what a killed run left half-written.
    """

    def __init__(self, folder: Path, keep: int):
        if keep < 1:
            raise ValueError(f"keep={keep}: a run keeps at least one checkpoint")
        self.folder, self.keep = Path(folder).absolute(), keep
        self.folder.mkdir(parents=True, exist_ok=True)
        for stale in self.folder.glob(f"{TMP}*"):
            shutil.rmtree(stale)

    def steps(self) -> list[int]:
        """The steps saved, in order."""
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())

    def save(self, step: int, state: Any, host: dict) -> Path:
        """Writes `state` (a pytree of arrays) and `host` (JSON) and returns when both are on the disk.

        Raises CheckpointError where that fails; the earlier checkpoints are untouched then.
        """
        path = self._path(step)
        write(path, state, host)
        for old in self.steps()[: -self.keep]:
            _remove(self._path(old))
        return path

    def restore(self, like: Any) -> Checkpoint | None:
        """The latest checkpoint, None if there is none. `like`: the tree expected, arrays or shapes.

        Raises CheckpointError for a damaged one: it is never skipped silently.
        """
        steps = self.steps()
        if not steps:
            return None
        fall_back = f"step {steps[-2]}" if len(steps) > 1 else "the beginning"
        path = self._path(steps[-1])
        state, host = read(path, like, f"remove {path} to go on from {fall_back}")
        return Checkpoint(steps[-1], state, host)

    def _path(self, step: int) -> Path:
        return self.folder / f"{step:06d}"


def save_params(path: Path, params: Any, model: dict) -> None:
    """Writes weights alone, and `model`, what they are the weights of (JSON), replacing what `path` held."""
    write(Path(path), params, {"model": model})


def load_params(path: Path, like: Any) -> Any:
    """Reads weights; `like` is the tree the model expects, arrays or shapes (see `read`).

    Weights in bfloat16 are widened where float32 is expected.
    """
    return read(Path(path), like, widen=True)[0]


def read_host(path: Path) -> dict:
    """The host's part of a checkpoint folder."""
    path = path.absolute()
    _check_files(path, RESTORE)
    return json.loads((path / "host.json").read_text())


def lazy_leaves(path: Path) -> dict[str, Any]:
    """The weights in a folder by their path below {"params": ...}; a leaf is read where it is indexed."""
    return {
        leaf.removeprefix("params/"): LazyLeaf(path.absolute() / "arrays", leaf.replace("/", "."))
        for leaf in json.loads((path / "manifest.json").read_text())["leaves"]
    }


class LazyLeaf:
    """An array on the disk: shape, dtype, and [index] -> numpy array."""

    def __init__(self, arrays: Path, name: str):
        base = {"driver": "ocdbt", "base": f"file://{arrays}/"}
        spec = {"driver": "zarr", "kvstore": base | {"path": f"{name}/"}}
        few = ts.Context(
            {"file_io_concurrency": {"limit": 2}, "data_copy_concurrency": {"limit": 2}}
        )
        self._store = ts.open(spec, read=True, context=few).result()
        self.shape, self.dtype = self._store.shape, self._store.dtype.numpy_dtype

    def __getitem__(self, index: tuple[int, ...]):
        return self._store[index].read().result()


def write(path: Path, tree: Any, host: dict) -> None:
    """Writes one checkpoint folder; the last step is a rename. `tree`: of jax or of numpy arrays."""
    path = path.absolute()
    tmp = path.with_name(TMP + path.name)
    host_text = json.dumps(host, indent=1, sort_keys=True, allow_nan=False)
    try:
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir(parents=True)
        if any(isinstance(x, np.ndarray) for x in jax.tree.leaves(tree)):
            _save_host_arrays(tmp / "arrays", tree)
        else:
            with ocp.StandardCheckpointer() as orbax:
                orbax.save(tmp / "arrays", tree)
        (tmp / "arrays" / "commit_success.txt").unlink(
            missing_ok=True
        )  # only says where it was written
        (tmp / "host.json").write_text(host_text)
        manifest = {"format": FORMAT, "leaves": _leaves(tree), "files": _digests(tmp)}
        (tmp / "manifest.json").write_text(json.dumps(manifest, indent=1))
        _sync(tmp)
        gone = path.with_name(f"{TMP}removed-{path.name}")
        shutil.rmtree(gone, ignore_errors=True)
        if path.exists():
            path.rename(gone)
        tmp.rename(path)
        _sync_one(path.parent)
        shutil.rmtree(gone, ignore_errors=True)
    except (OSError, ValueError, RuntimeError) as error:  # a full disk comes as any of them
        shutil.rmtree(tmp, ignore_errors=True)
        raise CheckpointError(f"cannot write checkpoint {path}: {_one_line(error)}") from error


def _save_host_arrays(folder: Path, tree: Any) -> None:
    """Saves numpy arrays, such as memory-mapped files, without a copy of the whole in memory.

    Weights stacked over blocks are cut block by block, so that one can be read alone.
    """
    handlers = type_handlers.create_type_handler_registry(
        (jax.Array, type_handlers.ArrayHandler()),
        (np.ndarray, type_handlers.NumpyHandler(deepcopy_host_arrays=False)),
    )
    handler = ocp.BasePyTreeCheckpointHandler(
        save_concurrent_bytes=CONCURRENT_BYTES, type_handler_registry=handlers
    )
    stacked = ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=(0,))
    whole = ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)
    save = ocp.args.PyTreeSave(
        tree,
        save_args=jax.tree.map(lambda x: stacked if x.ndim > 2 else whole, tree),
        # A file is gathered in memory several times over: a thousand files at most, and no tiny ones.
        ocdbt_target_data_file_size=max(
            2**22, sum(x.nbytes for x in jax.tree.leaves(tree)) // 1000
        ),
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(handler_impl=handler)) as orbax:
        orbax.save(folder, args=save)


def read(path: Path, like: Any, advice: str = RESTORE, widen: bool = False) -> tuple[Any, dict]:
    """Reads one checkpoint folder: the tree, of the type and shardings of `like`, and the host's part.

    Leaves of `like` that name no sharding go to the first device. Raises CheckpointError naming the
    damaged file, or the first leaf whose presence, shape or dtype is not as expected.
    """
    path = path.absolute()
    manifest = _check_files(path, advice)
    found, expected = manifest["leaves"], _leaves(like)
    for leaf in sorted(found.keys() | expected.keys()):
        wide = found.get(leaf, "").replace("bfloat16", "float32") if widen else found.get(leaf)
        if expected.get(leaf) not in (found.get(leaf), wide):
            raise CheckpointError(
                f"checkpoint {path} does not fit the model: {leaf} is {found.get(leaf, 'missing')} "
                f"in it, expected {expected.get(leaf, 'no such leaf')}; use the configuration it was "
                "written with"
            )
    with ocp.StandardCheckpointer() as orbax:
        tree = orbax.restore(path / "arrays", jax.tree.map(_abstract, like))
    return tree, json.loads((path / "host.json").read_text())


def _check_files(path: Path, advice: str) -> dict:
    """The manifest, once every file it lists has been compared with its digest."""
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint at {path}")

    def damaged(name: str, why: str) -> CheckpointError:
        return CheckpointError(f"checkpoint {path} is damaged: {name} {why}; {advice}")

    try:
        manifest = json.loads((path / "manifest.json").read_text())
    except FileNotFoundError:
        raise damaged("manifest.json", "is missing") from None
    except (ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise damaged("manifest.json", "cannot be parsed")
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"checkpoint {path} has format {manifest['format']}, this version reads {FORMAT}"
        )
    files, leaves = manifest.get("files"), manifest.get("leaves")
    for texts in (files, leaves):
        if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
            raise damaged("manifest.json", "names no files or no leaves")
    if "host.json" not in files:
        raise damaged("manifest.json", "does not name host.json")
    for name, digest in files.items():
        if not (path / name).is_file():
            raise damaged(name, "is missing")
        if _digest(path / name) != digest:
            raise damaged(name, "differs from what was written")
    return manifest


def _leaves(tree: Any) -> dict[str, str]:
    """Every leaf's place in the tree and its kind, such as "float32[2, 3]"."""
    return {
        jax.tree_util.keystr(place, simple=True, separator="/"): f"{x.dtype}{list(x.shape)}"
        for place, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(x, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): _digest(path) for path in files}


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove(path: Path) -> None:
    """Removes a checkpoint; half-removed it no longer bears a checkpoint's name."""
    gone = path.with_name(f"{TMP}removed-{path.name}")
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone)


def _sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync_one(path)


def _sync_one(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
