"""What transformers computes, made once by its own environment and kept beside the compilation cache."""

import hashlib
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PYTHON = ROOT / ".venv-reference" / "bin" / "python"


@pytest.fixture(scope="session")
def reference() -> Path:
    """The folder of tests/reference/make.py, made anew where it or the pinned packages changed."""
    if not PYTHON.exists():
        pytest.fail("no .venv-reference: run bash launch/setup.sh --reference")
    sources = (HERE / "cases.py", HERE / "make.py", ROOT / "launch/requirements-reference.txt")
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    folder = ROOT / ".cache" / f"reference-{digest}"
    if not (folder / "complete").exists():
        subprocess.run([PYTHON, HERE / "make.py", folder], check=True)
        (folder / "complete").touch()
    return folder
