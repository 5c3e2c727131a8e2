"""Tensors as SGLang's /update_weights_from_tensor reads them, written without torch.

The payload is base64 of a pickled [(name, CPU tensor), ...]. SGLang unpickles it with a list of permitted
globals, which has no numpy, so a tensor is written as torch itself pickles one: `_rebuild_tensor_v2` of a storage,
which `_load_from_bytes` reads from a file in torch's first format. Both are named here and looked up there.
"""

import pickle
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator

import numpy as np
import pybase64

STORAGES = {"float32": "FloatStorage", "bfloat16": "BFloat16Storage"}
MAGIC, FORMAT = 0x1950A86A20F9469CFC6C, 1001
PROTOCOL, INNER = (
    3,
    2,
)  # before frames: a value's pickle without its ends is a part of another; torch's own
HEAD, MARK, TUPLE, TUPLE2, REDUCE = b"\x80\x03", b"(", b"t", b"\x86", b"R"
PERSISTENT, STOP, LIST, APPENDS = b"Q", b".", b"]", b"e"

Tensor = tuple[str, np.ndarray]


def buckets(tensors: Iterable[Tensor], size: int) -> Iterator[list[Tensor]]:
    """The tensors in order, as many together as `size` bytes hold, at least one."""
    bucket, used = [], 0
    for name, tensor in tensors:
        if bucket and used + tensor.nbytes > size:
            yield bucket
            bucket, used = [], 0
        bucket.append((name, tensor))
        used += tensor.nbytes
    if bucket:
        yield bucket


def pack(tensors: Iterable[Tensor]) -> str:
    """The payload. Raises KeyError for another type than float32 and bfloat16."""
    body = b"".join(_value(name) + _tensor(tensor) + TUPLE2 for name, tensor in tensors)
    return pybase64.b64encode(HEAD + LIST + MARK + body + APPENDS + STOP).decode()


def _tensor(tensor: np.ndarray) -> bytes:
    """Pushes torch._utils._rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks)."""
    tensor = np.ascontiguousarray(tensor)
    stride = tuple(step // tensor.itemsize for step in tensor.strides)
    rest = (0, tensor.shape, stride, False, OrderedDict())
    storage = _global("torch.storage", "_load_from_bytes") + MARK + _value(_storage(tensor))
    arguments = storage + TUPLE + REDUCE + b"".join(map(_value, rest))
    return _global("torch._utils", "_rebuild_tensor_v2") + MARK + arguments + TUPLE + REDUCE


def _storage(tensor: np.ndarray) -> bytes:
    """A file of one storage as torch.save(..., _use_new_zipfile_serialization=False) writes it."""
    facts = {"protocol_version": FORMAT, "little_endian": True, "type_sizes": {}}
    key, kind = "0", _global("torch", STORAGES[tensor.dtype.name])
    place = _value("storage") + kind + b"".join(map(_value, (key, "cpu", tensor.size, None)))
    data = struct.pack("<q", tensor.size), tensor.reshape(-1).view(np.uint8).tobytes()
    return b"".join(
        (
            *(pickle.dumps(x, INNER) for x in (MAGIC, FORMAT, facts)),
            *(b"\x80\x02", MARK, place, TUPLE, PERSISTENT, STOP),
            *(pickle.dumps([key], INNER), *data),
        )
    )


def _value(value: object) -> bytes:
    """Pushes a plain value."""
    return pickle.dumps(value, PROTOCOL)[len(HEAD) : -len(STOP)]


def _global(module: str, name: str) -> bytes:
    """Pushes what `module` calls `name`, which need not exist here."""
    return b"c%b\n%b\n" % (module.encode(), name.encode())
