"""Imports run in one direction: host and device know nothing of each other, no library imports a main."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "t1jax"
FILES = sorted(ROOT.rglob("*.py"))
MAINS = {
    p.parent.name if p.stem == "__main__" else p.stem
    for p in (*ROOT.glob("*.py"), *ROOT.glob("*/__main__.py"))
    if "command.run(main)" in p.read_text()
}
HOST = ("agent", "sandbox", "rollout")
DEVICE = ("model", "ppo")


def imported(path: Path) -> set[str]:
    """Dotted names of all modules a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_design(path):
    names, room = imported(path), path.relative_to(ROOT).parts[0]
    if room in HOST:
        assert not [n for n in names if n.split(".")[0] in ("jax", "flax", "optax")]
        assert not [n for n in names if n.startswith(tuple(f"t1jax.{d}" for d in DEVICE))]
    if room in DEVICE:
        assert not [n for n in names if n.startswith(tuple(f"t1jax.{h}" for h in HOST))]
        if path.name not in (
            "hf.py",
            "hf_files.py",
        ):  # a main beside the model whose weights it moves
            assert not names & {"os", "pathlib", "json", "subprocess", "asyncio"}
    if path.parent != ROOT:
        mains = MAINS - {room}  # but its own
        assert not [n for n in names if n.split(".")[:1] == ["t1jax"] and n.split(".")[1] in mains]


def test_the_host_never_loads_jax():
    """Whatever a host module imports, however indirectly."""
    modules = [
        ".".join(("t1jax", *p.relative_to(ROOT).with_suffix("").parts))
        for p in FILES
        if p.relative_to(ROOT).parts[0] in HOST and p.stem not in ("__init__", "namespace_init")
    ]
    code = f"import sys, {', '.join(modules)}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent).returncode == 0


def test_the_mains_are_found():
    assert {"train", "sft", "evaluate", "tasks", "tokenizer", "bench"} <= MAINS


def test_files_stay_small():
    long = {str(p.relative_to(ROOT)): n for p in FILES if (n := p.read_text().count("\n")) > 360}
    assert not long
