"""What became of a recorded trial, compared with what can have: its task, attempt, end, verdict and reward."""

from collections.abc import Sequence

from t1jax.agent.episode import EpisodeConfig
from t1jax.agent.verify import OUTCOMES, reward
from t1jax.experiment import Experiment, RewardConfig
from t1jax.rollout.store import storable
from t1jax.types import Task, Trajectory, Turn

ANY_TIME = ("timeout", "infra")  # what can end a trial while its sampler or its sandbox is at work


def check_trial(
    experiment: Experiment, pool: Sequence[Task] | None, chunks: Sequence[Trajectory]
) -> None:
    """All of it, for the chunks of one trial. Raises ValueError with the first thing that cannot be.

    pool: item i is the task of trial i; None where it is not known any more.
    """
    first = chunks[0]
    place = f"trial {first.trial}: "
    for i, t in enumerate(chunks):
        if t.chunk != i:
            raise ValueError(f"trial {t.trial}, chunk {t.chunk}: the chunk before it is not there")
        if _shared(t) != _shared(first):
            raise ValueError(
                f"trial {t.trial}, chunk {t.chunk}: another outcome than the chunk before it"
            )
    if len(chunks) > 1 and experiment.episode.history == "tokens":
        raise ValueError(f"{place}{len(chunks)} chunks, though its history only grows")
    if pool is not None:
        check_task(first, pool[first.trial], place)
    check_attempt(first, experiment.rollout.max_attempts, place)
    turns = [turn for t in chunks for turn in t.turns]
    check_end(first.status, turns, experiment.episode, place)
    check_reward(first, experiment.reward, place)


def _shared(t: Trajectory) -> tuple:
    """What is the trial's, so that every chunk has it."""
    return t.task, t.family, t.attempt, t.status, t.cause, t.verdict, t.reward


def check_task(t: Trajectory, task: Task, place: str) -> None:
    found, wanted = [t.task, t.family], storable([task.name, task.family])
    if found != wanted:
        raise ValueError(
            f"{place}task and family {found}, the folder of tasks (is it the run's?) gives {wanted}"
        )


def check_attempt(t: Trajectory, most: int, place: str) -> None:
    """Attempts count from 0, and a trial is given up after the last only."""
    least = most - 1 if t.reward is None else 0
    if not least <= t.attempt < most:
        raise ValueError(f"{place}attempt {t.attempt} of {most} came to reward {t.reward}")


def check_end(status: str, turns: Sequence[Turn], config: EpisodeConfig, place: str) -> None:
    """The last turn allows the status, those before it go on, and commands have results."""
    for i, turn in enumerate(turns):
        if "context_full" not in endings(turns[:i], config):
            raise ValueError(f"{place}turn {i} comes after its end")
        cut_off = i == len(turns) - 1 and turn.command is not None
        if (turn.result is None) != (turn.command is None) and not cut_off:
            raise ValueError(f"{place}turn {i} has one of command and result without the other")
    if status not in endings(turns, config):
        raise ValueError(f"{place}status {status!r} cannot follow its {len(turns)} turns")


def endings(turns: Sequence[Turn], config: EpisodeConfig) -> set[str]:
    """How a trial can end after these turns; "context_full" is among them where another turn can follow."""
    if not turns:
        return {"context_full", *ANY_TIME}
    last = turns[-1]
    if last.finish != "stop":
        return {"length": {"length"}, "abort": {"infra"}}.get(last.finish, set())
    confirmed = config.protocol == "bash" or "submit" in [turn.action for turn in turns[-2:-1]]
    if last.action == "submit" and confirmed:
        return {"submitted", *(ANY_TIME if last.command else ())}
    return {"context_full" if len(turns) < config.max_turns else "out_of_turns", *ANY_TIME}


def check_reward(t: Trajectory, config: RewardConfig, place: str) -> None:
    """All but infrastructure failures have a verdict, it is one that there is, and the reward is that of it."""
    verdict = t.verdict
    if (verdict is None) != (t.status == "infra"):
        raise ValueError(f"{place}status {t.status!r} {'with' if verdict else 'without'} a verdict")
    if verdict is None:
        wanted = None
    else:
        tests, judged = len(verdict.assertions), verdict.outcome is not None
        if judged != (verdict.cause in OUTCOMES) or (tests > 0) != (verdict.cause == "report"):
            raise ValueError(
                f"{place}no verdict has outcome {verdict.outcome}, cause {verdict.cause!r}, {tests} tests"
            )
        wanted = reward(verdict, config.kind, config.scale)
    if t.reward != wanted:
        raise ValueError(f"{place}reward {t.reward}, the verdict gives {wanted}")
