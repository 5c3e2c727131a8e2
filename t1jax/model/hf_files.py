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
BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}


class Head(NamedTuple):
    """What a tensor is like; dtype as safetensors spells it."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BYTES[self.dtype]


class Shards:
    """The tensors of a checkpoint folder, read when asked for. Raises HFError for a folder that is none."""

    def __init__(self, folder: Path):
        self.folder = folder
        if not (folder / "config.json").is_file():
            raise HFError(f"{folder} holds no config.json: not a Hugging Face checkpoint")
        self.config = _read_json(folder / "config.json")
        self._files = {}
        if (folder / INDEX).is_file():
            where = _read_json(folder / INDEX).get("weight_map")
            if not isinstance(where, dict):
                raise HFError(f"{folder / INDEX} has no weight_map")
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
            held = list(file.keys())
            for tensor in held:
                if tensor in self._files:
                    raise HFError(f"{folder}: {tensor} is in two files, one of them {name}")
                if where is not None and where.get(tensor) != name:
                    raise HFError(f"{folder / INDEX} does not list {tensor}, which {name} holds")
            self._files |= dict.fromkeys(held, file)
        for tensor in where or ():
            if tensor not in self._files:
                raise HFError(f"{folder / INDEX} lists {tensor}, {where[tensor]} does not hold it")

    def names(self) -> list[str]:
        return list(self._files)

    def head(self, name: str) -> Head:
        part = self._files[name].get_slice(name)
        if part.get_dtype() not in BYTES:
            raise HFError(f"{self.folder}: {name} is {part.get_dtype()}, a type unknown here")
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
            if file.tell() != 8 + len(text) + header[name]["data_offsets"][1]:
                raise HFError(f"{path}: {name} has not the size of its dtype and shape")
        file.flush()
        os.fsync(file.fileno())


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise HFError(f"{path} is no JSON: {error}") from None
