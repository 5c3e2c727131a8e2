import numpy as np

from t1jax.evaluate import summarize, table
from t1jax.types import Assertion, Trajectory, Verdict


def trajectory(family: str, passing: int | None) -> Trajectory:
    """A trial that passes so many of four assertions; None = it was given up."""
    verdict = None
    if passing is not None:
        report = tuple(Assertion(str(i), i < passing) for i in range(4))
        verdict = Verdict(report, passing == 4, "report", "", 0.0)
    value = None if passing is None else passing / 20
    nothing = np.zeros((0, 0, 0), np.uint8)
    return Trajectory(family, family, 0, 0, 0, (), nothing, "submitted", "", 1.0, verdict, value)


def test_shares_and_means_by_hand():
    result = summarize(
        [trajectory("a", 4), trajectory("a", 2), trajectory("b", 0), trajectory("b", None)]
    )
    assert result["resolved"] == 1 / 3 and np.isclose(result["reward"], 0.1)
    assert (result["trials"], result["given_up"]) == (3, 1)
    assert result["families"]["a"]["resolved"] == 0.5
    assert np.isclose(result["families"]["a"]["reward"], 0.15)
    assert result["families"]["b"] == {"resolved": 0, "reward": 0}


def test_a_reward_is_no_pass():
    """Trap 59: most assertions pass, the task is not resolved."""
    assert summarize([trajectory("a", 3)])["resolved"] == 0


def test_the_table_has_a_line_a_family():
    before, after = summarize([trajectory("a", 2)]), summarize([trajectory("a", 4)])
    lines = table(before, after).splitlines()
    assert len(lines) == 2 and "0.0%" in lines[1] and "100.0%" in lines[1]
