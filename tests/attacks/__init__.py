"""Agents that cheat, by kind: files they plant, programs they replace, processes they leave, walls they climb."""

from attacks import files, host, processes, programs
from attacks.attack import PRELUDE, Attack

ATTACKS: dict[str, Attack] = files.ATTACKS | programs.ATTACKS | processes.ATTACKS | host.ATTACKS

__all__ = ["ATTACKS", "PRELUDE", "Attack"]
