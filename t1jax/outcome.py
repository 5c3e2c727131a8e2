"""What became of a recorded trial, compared with what can have: its task, attempt, end, verdict and reward."""

from collections.abc import Sequence

from t1jax.agent.episode import EpisodeConfig
from t1jax.agent.verify import OUTCOMES, reward
from t1jax.experiment import Experiment, RewardConfig
from t1jax.rollout.store import storable
from t1jax.types import Task, Trajectory, Turn

ANY_TIME = ("timeout", "infra")  # what can end a trial while its sampler or its sandbox is at work
LOOKS = ("command", "submit", "summary")  # turns in which the terminal is read


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
    check_summaries(experiment.episode, chunks)
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


def check_summaries(config: EpisodeConfig, chunks: Sequence[Trajectory]) -> None:
    """A summary ends its chunk; with history "tokens", nothing else does."""
    for t in chunks:
        place = f"trial {t.trial}, chunk {t.chunk}: "
        summaries = [i for i, turn in enumerate(t.turns) if turn.action == "summary"]
        if summaries and (not config.compact_below or summaries != [len(t.turns) - 1]):
            raise ValueError(f"{place}turn {summaries[0]} is a summary, where none can be")
        if t is not chunks[-1] and config.history == "tokens" and not summaries:
            raise ValueError(f"{place}it is not the last, though its history only grows")


def check_end(status: str, turns: Sequence[Turn], config: EpisodeConfig, place: str) -> None:
    """The last turn allows the status, those before it go on, and commands have results."""
    for i, turn in enumerate(turns):
        if "context_full" not in endings(turns[:i], config):
            raise ValueError(f"{place}turn {i} comes after its end")
        ran = turn.command is not None or turn.action == "summary"
        if config.protocol == "terminus":
            ran = turn.action in LOOKS
        cut_off = i == len(turns) - 1 and ran
        if (turn.result is not None) != ran and not cut_off:
            raise ValueError(f"{place}turn {i} has one of command and result without the other")
    if status not in endings(turns, config):
        raise ValueError(f"{place}status {status!r} cannot follow its {len(turns)} turns")


def endings(turns: Sequence[Turn], config: EpisodeConfig) -> set[str]:
    """How a trial can end after these turns; "context_full" is among them where another turn can follow."""
    any_time = set(ANY_TIME)
    if config.protocol == "terminus" and (not turns or turns[-1].action in LOOKS):
        any_time.add("closed")
    if not turns:
        return {"context_full", *any_time}
    last = turns[-1]
    if last.finish != "stop" and (last.action, last.finish) != ("summary", "length"):
        return {"length": {"length"}, "abort": {"infra"}}.get(last.finish, set())
    confirmed = config.protocol == "bash" or "submit" in [turn.action for turn in turns[-2:-1]]
    if last.action == "submit" and confirmed:
        took = last.command or config.protocol == "terminus"
        return {"submitted", *(any_time if took else ())}
    return {"context_full" if len(turns) < config.max_turns else "out_of_turns", *any_time}


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
