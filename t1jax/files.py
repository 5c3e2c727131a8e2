"""Small files, whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented JSON under a temporary name, then renames it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f"tmp-{path.name}")
    try:
        with open(tmp, "w") as file:
            file.write(json.dumps(value, indent=1, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        tmp.replace(path)
    except OSError:
        tmp.unlink(missing_ok=True)
        raise
