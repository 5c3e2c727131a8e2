"""The files of a Hugging Face checkpoint: safetensors shards, their index, config.json."""

import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors import safe_open

from t1jax.model.hf_config import HFError

INDEX = "model.safetensors.index.json"
DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16)}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}  # else 1


class Head(NamedTuple):
    """What a tensor is like; dtype as safetensors spells it."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BYTES.get(self.dtype, 1)


class Shards:
    """The tensors of a checkpoint folder, read when asked for. Raises HFError for a folder that is none."""

    def __init__(self, folder: Path):
        self.folder = folder
        if not (folder / "config.json").is_file():
            raise HFError(f"{folder} holds no config.json: not a Hugging Face checkpoint")
        self.config = _read_json(folder / "config.json")
        self._files = {}
        if (folder / INDEX).is_file():
            where = _read_json(folder / INDEX)["weight_map"]
            names = sorted(set(where.values()))
        else:
            where, names = None, sorted(p.name for p in folder.glob("*.safetensors"))
        if not names:
            raise HFError(f"{folder} holds no *.safetensors")
        for name in names:
            try:
                file = safe_open(folder / name, "numpy")
            except Exception as error:  # safetensors raises its own and OSError
                raise HFError(f"{folder / name} cannot be read: {error}") from error
            self._files |= dict.fromkeys(file.keys(), file)
        for name in where or ():
            if name not in self._files:
                raise HFError(f"{folder / INDEX} lists {name}, {where[name]} does not hold it")

    def names(self) -> list[str]:
        return list(self._files)

    def head(self, name: str) -> Head:
        part = self._files[name].get_slice(name)
        return Head(part.get_dtype(), tuple(part.get_shape()))

    def read(self, name: str) -> np.ndarray:
        return self._files[name].get_tensor(name)


def write_shard(path: Path, heads: Mapping[str, Head], take: Callable[[str], np.ndarray]) -> None:
    """One safetensors file, a tensor at a time: the library's own writer holds a shard three times.

    The format: the header's length as u64, the header as JSON, then the tensors, little-endian.
    """
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, head in heads.items():
        start, end = end, end + head.nbytes
        header[name] = {"dtype": head.dtype, "shape": head.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, head in heads.items():
            tensor = take(name)
            for part in tensor if tensor.ndim > 2 else [tensor]:  # an expert at a time
                part = np.ascontiguousarray(part, DTYPES.get(head.dtype, part.dtype))
                file.write(part.reshape(-1).view(np.uint8))
        file.flush()
        os.fsync(file.fileno())


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise HFError(f"{path} is no JSON: {error}") from None
