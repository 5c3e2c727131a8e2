"""Every authored task: its own solution has full reward, doing nothing has not, over the same assertions."""

import asyncio

import pytest
from authored import TASKS, judged

from t1jax.agent.verify import reward
from t1jax.preflight import attempt

pytestmark = pytest.mark.docker


@pytest.mark.parametrize("name", TASKS)
def test_the_solution_resolves_it_and_doing_nothing_does_not(name):
    task = TASKS[name]

    async def both(make):
        return await asyncio.gather(*(attempt(task, make, True, oracle=o) for o in (False, True)))

    noop, oracle = judged(both)
    assert (oracle.cause, noop.cause) == ("report", "report"), (oracle.output, noop.output)
    assert oracle.outcome is True and oracle.passing == len(oracle.assertions) >= 5, oracle.output
    assert noop.outcome is False and noop.passing <= 0.5 * oracle.passing, noop.output
    assert [a.name for a in noop.assertions] == [a.name for a in oracle.assertions]
    assert reward(oracle) > reward(noop)


def test_there_are_tasks_of_many_kinds():
    assert len(TASKS) >= 12 and sum(task.live_processes for task in TASKS.values()) == 2
    assert not any(task.unknown_keys for task in TASKS.values())
