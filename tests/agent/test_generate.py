"""Generated tasks, judged by their own verifiers in real sandboxes."""

import asyncio
import itertools
import json

import pytest

from t1jax.agent.families import FAMILIES, NAMES
from t1jax.agent.generate import generate, instances, split_of
from t1jax.agent.task import load_tasks
from t1jax.agent.verify import verify
from t1jax.sandbox.namespace import NamespaceSandbox

EACH = 2  # instances of every family
COUNT = EACH * len(FAMILIES)


def drawn(split: str, count: int, seed: int = 0):
    return list(itertools.islice(instances(split, seed), count))


async def attempt(task, script):
    sandbox = await NamespaceSandbox.start(task)
    try:
        for line in script:
            result = await sandbox.run(line, 10)
            assert result.exit_code == 0, (line, result.output)
        return await verify(task, sandbox)
    finally:
        await sandbox.close()


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """(instance, verdicts of its solution, of doing nothing, of each flawed script)."""
    folder = tmp_path_factory.mktemp("tasks") / "train"
    generate(folder, "train", COUNT, 0)

    async def run():
        places = asyncio.Semaphore(8)

        async def one(task, script):
            async with places:
                return await attempt(task, script)

        rows = []
        for task, instance in zip(load_tasks(folder), drawn("train", COUNT), strict=True):
            scripts = (instance.solution, (), *instance.flawed)
            rows.append((instance, [one(task, script) for script in scripts]))
        return [(instance, await asyncio.gather(*pending)) for instance, pending in rows]

    return asyncio.run(run())


def test_the_solution_passes_every_assertion(verdicts):
    for instance, (solution, *_) in verdicts:
        assert solution.outcome is True and solution.cause == "report", instance
        assert 2 <= len(solution.assertions) == solution.passing <= 20


def test_doing_nothing_never_resolves(verdicts):
    for instance, (_, nothing, *_) in verdicts:
        assert nothing.outcome is False, instance


def test_flawed_scripts_pass_some_assertions_and_fail_two(verdicts):
    for instance, (solution, _, *flawed) in verdicts:
        assert len(flawed) >= 3
        for script, verdict in zip(instance.flawed, flawed, strict=True):
            assert verdict.outcome is False, (instance, script)
            assert 0 < verdict.passing <= len(solution.assertions) - 2, (instance, script)


def test_the_number_of_assertions_is_constant(verdicts):
    for _, found in verdicts:
        assert len({len(verdict.assertions) for verdict in found}) == 1


def test_the_leftover_build_file_fails_the_verifier(verdicts):
    for instance, found in verdicts:
        if instance.family == "cleanup":
            index = next(i for i, s in enumerate(instance.flawed) if "rm" not in "".join(s))
            failed = [a.name for a in found[2 + index].assertions if not a.passed]
            assert "nothing else" in failed and "make is gone" in failed


def test_splits_are_disjoint_whatever_the_seed():
    train = {i.instruction for s in (0, 1) for i in drawn("train", 800, s)}
    held_out = {i.instruction for s in (0, 1) for i in drawn("eval", 400, s)}
    assert not train & held_out
    assert all(split_of(i) == "eval" for i in drawn("eval", 40))


def test_instances_are_spread_over_the_families_and_reproducible():
    first = drawn("train", 80)
    assert first == drawn("train", 80)
    assert first != drawn("train", 80, seed=1)
    assert {f: sum(i.family == f for i in first) for f in FAMILIES} == dict.fromkeys(FAMILIES, 10)


def test_names_stand_behind_a_space():
    for instance in drawn("train", 80):
        for text in (instance.instruction, *instance.solution):
            for name in NAMES:
                assert text.count(name) == text.count(f" {name}"), text


def test_an_existing_folder_is_left_alone(tmp_path):
    generate(tmp_path / "t", "train", 8, 0)
    before = sorted(tmp_path.rglob("*"))
    generate(tmp_path / "t", "train", 16, 1)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_report_is_ctrf(tmp_path):
    generate(tmp_path / "t", "eval", 1, 0)
    (task,) = load_tasks(tmp_path / "t")

    async def report():
        sandbox = await NamespaceSandbox.start(task)
        try:
            await verify(task, sandbox)
            return await sandbox.get("/logs/verifier/ctrf.json", 1 << 20)
        finally:
            await sandbox.close()

    results = json.loads(asyncio.run(report()))["results"]
    assert results["summary"]["tests"] == len(results["tests"])
    assert results["summary"]["failed"] == sum(t["status"] == "failed" for t in results["tests"])


STRAY = "touch 'a b' '*' '$(touch x)' '\"},{' $'two\\nlines'"
OUTSIDE = "mkdir /tmp/o; for f in *; do [[ -f $f ]] && mv $f /tmp/o && ln -s /tmp/o/$f; done; true"
FIFO = "for f in *; do [[ -f $f ]] && rm $f && mkfifo $f; done; true"
NUL = r"for f in *; do [[ -f $f ]] && chmod u+w $f && printf 'x\0' >> $f; done; true"
LARGE = "for f in *; do [[ -f $f ]] && chmod u+w $f && truncate -s 14M $f; done; true"
GONE = "cd /; rm -r /app"


@pytest.mark.parametrize("trick", [STRAY, OUTSIDE, FIFO, NUL, LARGE, GONE])
def test_hostile_work_folders_fail_with_a_report(tmp_path, trick):
    generate(tmp_path / "t", "train", len(FAMILIES), 0)

    async def spoil(task, instance):
        sandbox = await NamespaceSandbox.start(task)
        try:
            for line in (*instance.solution, trick):
                await sandbox.run(line, 10)
            return await verify(task, sandbox)
        finally:
            await sandbox.close()

    pairs = zip(load_tasks(tmp_path / "t"), drawn("train", len(FAMILIES)), strict=True)
    for task, instance in pairs:
        verdict = asyncio.run(spoil(task, instance))
        padded = instance.family == "archive" and trick in (NUL, LARGE)  # still an archive
        assert (verdict.cause, verdict.outcome) == ("report", padded), (instance, verdict)
        assert verdict.seconds < 2
        assert trick != GONE or verdict.passing == 0
