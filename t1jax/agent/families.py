"""The kinds of generated tasks: each draws an instance with its solution and plausible flawed scripts.

Names are single lowercase words and always follow a space, so that a small tokenizer has one token for
each and a small model can learn to copy them. Every flawed script passes some assertions and not all.
"""

import dataclasses
import random
from collections.abc import Callable, Mapping

NAMES = (
    *("acorn", "amber", "aspen", "basil", "birch", "cedar", "clover", "coral"),
    *("daisy", "ember", "fern", "flint", "ginger", "hazel", "heron", "iris"),
    *("ivory", "jade", "juniper", "laurel", "lemon", "lotus", "maple", "mint"),
    *("olive", "onyx", "pearl", "poppy", "raven", "sage", "topaz", "willow"),
)
MODES = ("400", "444", "500", "555", "600", "640", "700", "750")

Script = tuple[str, ...]  # one command a turn, then submit


@dataclasses.dataclass(frozen=True)
class Instance:
    """One task. `files`: what lies in the work folder; `checks`: assertion name -> bash predicate."""

    family: str
    instruction: str
    files: Mapping[str, str]
    checks: Mapping[str, str]
    solution: Script
    flawed: tuple[Script, ...]


def write(rng: random.Random) -> Instance:
    a, b, x, y = rng.sample(NAMES, 4)
    first, second = f"echo {x} > {a}", f"echo {y} > {b}"
    return Instance(
        "write",
        f"Write {x} into {a} and {y} into {b} .",
        {},
        _text(a, x) | _text(b, y) | _only(a, b),
        (first, second),
        ((first,), (first, f"echo {x} > {b}"), (first, f"echo {y} >> {a}")),
    )


def edit(rng: random.Random) -> Instance:
    a, b, x, y, z = rng.sample(NAMES, 5)
    rename, replace = f"mv {a} {b}", f'sed -i "s/ {x}/ {y}/" {b}'
    return Instance(
        "edit",
        f"Rename {a} to {b} and replace {x} by {y} in it .",
        {a: f"use {x}\nkeep {z}\n"},
        _gone(a)
        | _text(b, f"use {y}\nkeep {z}", says=f"use {y}")
        | {f"{b} lacks {x}": f"lacks {b} 'use {x}'", f"{b} keeps {z}": f"says {b} 'keep {z}'"}
        | _only(b),
        (rename, replace),
        (
            (rename,),
            (f"cp {a} {b}", replace),
            (f"cp {a} {b}",),
            (rename, f'sed -i "s/ {z}/ {y}/" {b}'),
        ),
    )


def count(rng: random.Random) -> Instance:
    a, b, c = rng.sample(NAMES, 3)
    lines = [" ".join(rng.choices(NAMES, k=rng.randint(2, 3))) for _ in range(rng.randint(2, 6))]
    text = "\n".join(lines) + "\n"
    first, second = f"wc -l < {a} > {b}", f"wc -w < {a} > {c}"
    return Instance(
        "count",
        f"Count the lines of {a} into {b} and its words into {c} .",
        {a: text},
        _kept(a, text.rstrip("\n"))
        | _text(b, str(len(lines)))
        | _text(c, str(len(text.split())))
        | _only(a, b, c),
        (first, second),
        ((first,), (first, f"wc -c < {a} > {c}"), (f"wc -w < {a} > {b}",)),
    )


def sort(rng: random.Random) -> Instance:
    a, b = rng.sample(NAMES, 2)
    words = rng.sample(NAMES, rng.randint(2, 4))
    lines = [*words, rng.choice(words)]
    rng.shuffle(lines)
    lines += [min(words)] if lines == sorted(lines) else []  # never in order already
    unique, remove = f"sort -u {a} > {b}", f"rm {a}"
    return Instance(
        "sort",
        f"Sort {a} into {b} without repeats , then delete {a} .",
        {a: "\n".join(lines) + "\n"},
        _gone(a)
        | _text(b, "\n".join(sorted(words)), says=min(words))
        | {
            f"{b} is complete": f"lines {b} {len(words)}",
            f"{b} is in order": f"ordered {b}",
            f"{b} has no repeats": f"distinct {b}",
        }
        | _only(b),
        (unique, remove),
        ((unique,), (f"sort {a} > {b}", remove), (f"sort {a} > {b}",), (f"cp {a} {b}", remove)),
    )


def perms(rng: random.Random) -> Instance:
    a, b, x, y = rng.sample(NAMES, 4)
    p, q = rng.sample(MODES, 2)
    first, second = f"chmod {p} {a}", f"chmod {q} {b}"
    return Instance(
        "perms",
        f"Set the mode of {a} to {p} and of {b} to {q} .",
        {a: f"{x}\n", b: f"{y}\n"},
        _mode(a, p) | _mode(b, q) | _kept(a, x) | _kept(b, y) | _only(a, b),
        (first, second),
        ((first,), (first, f"chmod {p} {b}"), (f"chmod {q} {a}", f"chmod {p} {b}")),
    )


def archive(rng: random.Random) -> Instance:
    a, b, c, x, y = rng.sample(NAMES, 5)
    pack, remove = f"tar cf {c} {a} {b}", f"rm {a} {b}"
    return Instance(
        "archive",
        f"Pack {a} and {b} into the archive {c} , then delete both .",
        {a: f"{x}\n", b: f"{y}\n"},
        {
            f"{c} exists": f"exists {c}",
            f"{c} packs {a}": f"packs {c} {a} {x}",
            f"{c} packs {b}": f"packs {c} {b} {y}",
            f"{c} packs both": f"members {c} {a} {b}",
        }
        | _gone(a)
        | _gone(b)
        | _only(c),
        (pack, remove),
        ((pack,), (pack, f"rm {a}"), (f"tar cf {c} {a}", remove), (f"tar cf {c} {b}", f"rm {a}")),
    )


def cleanup(rng: random.Random) -> Instance:
    """The paper's case study: the build leaves files behind, only the deliverable may stay."""
    a, b, c, x = rng.sample(NAMES, 4)
    program = f"echo {x} "
    make, attempt, remove = f"sh make {a} {b}", f"sh {b}", f"rm make {a} {c}"
    return Instance(
        "cleanup",
        f"Run make on {a} to get {b} , try it , then leave only {b} .",
        {
            a: f"{x}\n",
            "make": f'read word < "$1"\necho "echo $word " > "$2"\nls > {c}\necho left {c}\n',
        },
        _text(b, program) | _gone("make") | _gone(a) | _gone(c) | _only(b),
        (make, attempt, remove),
        ((make, attempt), (make, attempt, f"rm make {a}"), (make, attempt, f"rm {c}"), (make,)),
    )


def tree(rng: random.Random) -> Instance:
    a, b, c, d, x, y = rng.sample(NAMES, 6)
    folders, move, copy = f"mkdir {a} {b}", f"mv {c} {a}", f"cp {d} {b}"
    return Instance(
        "tree",
        f"Make folders {a} and {b} , move {c} into {a} , copy {d} into {b} .",
        {c: f"{x}\n", d: f"{y}\n"},
        _text(f"{a}/{c}", x) | _text(f"{b}/{d}", y) | _gone(c) | _kept(d, y) | _only(a, b, d),
        (folders, move, copy),
        (
            (folders, move),
            (folders, f"cp {c} {a}", copy),
            (folders, move, f"mv {d} {b}"),
            (folders, f"cp {c} {a}"),
        ),
    )


FAMILIES: dict[str, Callable[[random.Random], Instance]] = {
    draw.__name__: draw for draw in (write, edit, count, sort, perms, archive, cleanup, tree)
}


def _text(path: str, text: str, says: str | None = None) -> dict[str, str]:
    """A file with this text; a file that `says` a line of it (the whole, if not given) has two of three."""
    return {
        f"{path} exists": f"exists {path}",
        f"{path} says": f"says {path} {_quote(says or text)}",
        f"{path} is exact": f"holds {path} {_quote(text)}",
    }


def _kept(path: str, text: str) -> dict[str, str]:
    return {f"{path} is kept": f"holds {path} {_quote(text)}"}


def _gone(path: str) -> dict[str, str]:
    return {f"{path} is gone": f"absent {path}"}


def _only(*names: str) -> dict[str, str]:
    return {"nothing else": f"only {' '.join(sorted(names))}"}


def _mode(path: str, mode: str) -> dict[str, str]:
    owner, group, others = mode
    return {
        f"{path} for its owner": f"mode {path} '{owner}??'",
        f"{path} for its group": f"mode {path} '?{group}?'",
        f"{path} for others": f"mode {path} '??{others}'",
        f"{path} has mode {mode}": f"mode {path} {mode}",
    }


def _quote(text: str) -> str:
    """A bash word for plain text of several lines."""
    return "$'" + text.replace("\n", "\\n") + "'"
