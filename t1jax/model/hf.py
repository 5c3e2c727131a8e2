"""Hugging Face checkpoints to policy folders and back, one tensor at a time.

    python -m t1jax.model.hf import --checkpoint=HF_FOLDER --out=POLICY [--dtype=bfloat16]
    python -m t1jax.model.hf export --checkpoint=POLICY --out=HF_FOLDER [--like=HF_FOLDER] [--dtype=...]

A policy folder is what runs write and start from (see t1jax.checkpoint); its host.json names the model.
`export --like` takes everything but the weights from there: names and dtypes of the tensors, config.json,
tokenizer files, and the tensors that import skips (vision tower, MTP).
Names and shapes are checked before anything is written. Import needs as much scratch disk beside `out` as
the weights take; of host memory both need little more than one tensor or shard.
"""

import dataclasses
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from t1jax import checkpoint, command
from t1jax.files import write_json
from t1jax.model.config import ModelConfig
from t1jax.model.hf_config import HFError, from_hf, to_hf
from t1jax.model.hf_files import DTYPES, INDEX, NAMES, Head, Shards, write_shard
from t1jax.model.hf_names import (
    SKIPPED,
    Place,
    accepted,
    bare_name,
    from_leaf,
    part_of,
    tensor_shape,
    tensors,
    text_name,
    to_leaf,
)
from t1jax.model.lm import init_policy

SHARD_BYTES = 5 * 10**9
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("preprocessor_config.json", "video_preprocessor_config.json", "LICENSE"),
)


def import_checkpoint(source: Path, out: Path, dtype: str | None = None) -> dict[str, Any]:
    """Writes the new policy folder `out`; returns what host.json says: model and skipped tensors.

    `dtype`: of the parameters, by default the checkpoint's own. Raises HFError naming a tensor that is
    missing, extra, of a wrong shape, there twice, or whose values `dtype` cannot hold, and where `out`
    holds files already.
    """
    _check_new(out)
    shards = Shards(source)
    config = from_hf(shards.config)
    found, skipped = match(config, shards)
    dtype = dtype or _dtype_of(shards, found)
    config = dataclasses.replace(config, param_dtype=dtype)
    host = {"model": dataclasses.asdict(config), "skipped": skipped}
    scratch = out.absolute().with_name(f"tmp-import-{out.name}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        leaves = {
            path: np.memmap(scratch / f"{i}", x.dtype, "w+", shape=x.shape)
            for i, (path, x) in enumerate(abstract(config).items())
        }
        for name, place in found.items():
            tensor = shards.read(name)
            target = part_of(place, leaves[place.leaf][place.index])
            target[...] = to_leaf(place, tensor)
            if target.dtype.itemsize < tensor.dtype.itemsize and not np.array_equal(
                target.astype(tensor.dtype), to_leaf(place, tensor), equal_nan=True
            ):
                raise HFError(f"{name} is {tensor.dtype} and does not fit {dtype}: --dtype=float32")
        checkpoint.write(out, _tree(leaves), host)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return host


def match(config: ModelConfig, shards: Shards) -> tuple[dict[str, Place], list[str]]:
    """The place of each tensor of the text model, and the names of those skipped."""
    known, leaves = accepted(config), abstract(config)
    found, skipped, filled = {}, [], {}
    for name in shards.names():
        bare = bare_name(name)
        if name.startswith(SKIPPED) or (config.tie_embeddings and bare == "lm_head.weight"):
            skipped.append(name)
            continue
        place = known.get(bare)
        if place is None:
            raise HFError(f"{shards.folder}: {name} is no tensor of this model")
        expected = tensor_shape(place, leaves[place.leaf].shape)
        if shards.head(name).shape != expected:
            raise HFError(
                f"{shards.folder}: {name} has shape {list(shards.head(name).shape)}, expected "
                f"{list(expected)}"
            )
        if shards.head(name).dtype not in DTYPES:
            raise HFError(
                f"{shards.folder}: {name} is {shards.head(name).dtype}, expected F32 or BF16"
            )
        if place in filled:
            raise HFError(f"{shards.folder}: {name} and {filled[place]} are the same tensor")
        filled[place] = name
        found[name] = place
    for name, place in found.items():
        whole = place._replace(index=place.index[:1], part=0, parts=1)
        if whole != place and whole in filled:
            raise HFError(f"{shards.folder}: {name} is also part of {filled[whole]}")
    for name, place in tensors(config).items():
        if not _covered(config, place, filled):
            raise HFError(f"{shards.folder}: {name} is missing")
    return found, sorted(skipped)


class Wanted(NamedTuple):
    """A tensor to write."""

    place: Place
    dtype: np.dtype

    def head(self, params: Mapping[str, Any]) -> "Head":
        shape = tensor_shape(self.place, params[self.place.leaf].shape)
        return Head(NAMES[self.dtype], shape)

    def take(self, params: Mapping[str, Any]) -> np.ndarray:
        value = np.asarray(params[self.place.leaf][self.place.index])
        return from_leaf(self.place, part_of(self.place, value))


def export_params(
    params: Mapping[str, Any],
    config: ModelConfig,
    out: Path,
    *,
    like: Shards | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    writers: int = 1,
) -> list[str]:
    """Writes `out`/*.safetensors, their index and config.json; returns the names of the shards.

    params: leaf path -> anything with shape, dtype and [index], such as a jax array, sharded or not: one
    tensor is read at a time. With `like`, the tensors have the names and dtypes of that checkpoint, and
    those the model has no use for are carried over, as are its config.json and tokenizer files; else
    `dtype`, by default the leaf's own. `writers` shards are written at one time. `out` appears when it is
    whole; raises HFError where it holds files already, which an engine would read together with these.
    """
    _check_new(out)
    if like and dtype:
        raise HFError("the checkpoint to be like says which dtypes to write: leave --dtype out")
    carried = []
    if like:
        found, skipped = match(config, like)
        carried = [name for name in skipped if name.startswith(SKIPPED)]
        found |= {
            name: Place("trunk/embed") for name in skipped if name not in carried
        }  # tied head
        wanted = {
            name: Wanted(place, DTYPES[like.head(name).dtype]) for name, place in found.items()
        }
    else:
        wanted = _wanted(params, config, dtype)
    sizes = {name: w.head(params).nbytes for name, w in wanted.items()}
    sizes |= {name: like.head(name).nbytes for name in carried}
    plan = _plan(sizes, shard_bytes)
    files = [f"model-{i + 1:05d}-of-{len(plan):05d}.safetensors" for i in range(len(plan))]

    def take(name: str) -> np.ndarray:
        return wanted[name].take(params) if name in wanted else like.read(name)

    tmp = out.absolute().with_name(f"tmp-export-{out.name}")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)

    def write(file: str, names: list[str]) -> None:
        heads = {n: wanted[n].head(params) if n in wanted else like.head(n) for n in names}
        write_shard(tmp / file, heads, take)

    try:
        with ThreadPoolExecutor(writers) as pool:
            list(pool.map(write, files, plan))
        where = {name: file for file, names in zip(files, plan, strict=True) for name in names}
        size = {"total_size": sum(sizes.values())}
        write_json(tmp / INDEX, {"metadata": size, "weight_map": where})
        named = next(iter(wanted.values())).dtype.name
        write_json(tmp / "config.json", like.config if like else to_hf(config, named))
        for name in TOKENIZER_FILES if like else ():
            if (like.folder / name).is_file():
                shutil.copyfile(like.folder / name, tmp / name)
        tmp.replace(out)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    return files


def export_tensors(
    params: Mapping[str, Any], config: ModelConfig, dtype: str | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors that `export_params` writes, with their names, one at a time."""
    for name, tensor in _wanted(params, config, dtype).items():
        yield name, tensor.take(params).astype(tensor.dtype)


def export_checkpoint(
    source: Path, out: Path, like: Path | None, dtype: str | None, shard_bytes: int
) -> list[str]:
    """Writes the policy folder `source` as a Hugging Face checkpoint; returns the names of its shards.

    With `like`, everything but the weights comes from there, and the model must be the same.
    """
    model = checkpoint.read_host(source).get("model")
    if model is None:
        raise HFError(f"{source / 'host.json'} names no model: is it a policy folder?")
    config = ModelConfig(**model)
    shards = Shards(like) if like else None
    if shards and _sizes(from_hf(shards.config)) != _sizes(config):
        raise HFError(f"{like} is of another model than {source}")
    leaves = checkpoint.lazy_leaves(source)
    return export_params(leaves, config, out, like=shards, dtype=dtype, shard_bytes=shard_bytes)


def abstract(config: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter, by path."""
    return by_path(jax.eval_shape(lambda: init_policy(config, jax.random.key(0))))


def by_path(params: dict) -> dict[str, Any]:
    """The leaves of a policy's parameters by their path below {"params": ...}."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): x
        for path, x in jax.tree_util.tree_leaves_with_path(params["params"])
    }


def _wanted(params: Mapping[str, Any], config: ModelConfig, dtype: str | None) -> dict[str, Wanted]:
    """Every tensor of a checkpoint of the text model, by name, in `dtype` or that of its leaf."""
    return {
        text_name(name): Wanted(place, np.dtype(dtype or params[place.leaf].dtype))
        for name, place in tensors(config).items()
    }


def _check_new(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise HFError(f"{out} is not empty: name a new folder")


def _covered(config: ModelConfig, place: Place, filled: Mapping[Place, str]) -> bool:
    """Whether a tensor is there in either form."""
    if place in filled:
        return True
    leaf = place.leaf.rsplit("/", 1)[-1]
    if leaf not in ("gate_up", "down"):
        return False
    whole = Place(place.leaf, place.index[:1], "linear")
    if whole in filled:
        return True
    parts = 2 if leaf == "gate_up" else 1
    each = (
        Place(place.leaf, (*whole.index, expert), "linear", part, parts)
        for expert in range(config.num_experts)
        for part in range(parts)
    )
    return all(one in filled for one in each)


def _plan(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """Names by shard, in order, as many as fit."""
    shards, used = [[]], 0
    for name, size in sizes.items():
        if shards[-1] and used + size > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _dtype_of(shards: Shards, found: Mapping[str, Place]) -> str:
    """The dtype of the embedding table."""
    name = next(name for name, place in found.items() if place.leaf == "trunk/embed")
    return DTYPES[shards.head(name).dtype].name


def _sizes(config: ModelConfig) -> ModelConfig:
    """A model without its dtypes and the ways it is computed."""
    default = ModelConfig.__dataclass_fields__
    names = ("embed_std", "dtype", "param_dtype", "router_dtype", "logits_dtype")
    names += ("remat", "delta_chunk", "logp_chunk")
    return dataclasses.replace(config, **{name: default[name].default for name in names})


def _tree(leaves: Mapping[str, Any]) -> dict:
    """Nested dictionaries from paths."""
    tree = {}
    for path, leaf in leaves.items():
        *rooms, name = path.split("/")
        room = tree
        for part in rooms:
            room = room.setdefault(part, {})
        room[name] = leaf
    return {"params": tree}


def main(verb: str) -> None:
    source, out = Path(CHECKPOINT.value), Path(OUT.value)
    if verb == "import":
        host = import_checkpoint(source, out, DTYPE.value)
        print(json.dumps({"model": host["model"], "skipped": host["skipped"]}))
    else:
        like = Path(LIKE.value) if LIKE.value else None
        shard_bytes = int(SHARD_GB.value * 10**9)
        files = export_checkpoint(source, out, like, DTYPE.value, shard_bytes)
        print(json.dumps({"shards": files}))


if __name__ == "__main__":
    CHECKPOINT = flags.DEFINE_string("checkpoint", None, "The folder to read.", required=True)
    OUT = flags.DEFINE_string("out", None, "The folder to write.", required=True)
    DTYPE = flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], "Of what is written.")
    LIKE = flags.DEFINE_string("like", None, "export: where all but the weights comes from.")
    SHARD_GB = flags.DEFINE_float(
        "shard_gb", SHARD_BYTES / 10**9, "export: size of a shard.", 0.001
    )
    if len(sys.argv) < 2 or sys.argv[1] not in ("import", "export"):
        command.fail(
            "say import or export: python -m t1jax.model.hf import --checkpoint=... --out=..."
        )
    verb = sys.argv.pop(1)
    command.run(lambda: main(verb))
