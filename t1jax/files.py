"""Small files, whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented JSON under a temporary name, then renames it. Raises OSError."""
    write_bytes(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Writes `data` under a temporary name, then renames it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f"tmp-{path.name}")
    try:
        with open(tmp, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        tmp.replace(path)
    except OSError:
        tmp.unlink(missing_ok=True)
        raise
