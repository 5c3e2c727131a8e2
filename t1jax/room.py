"""Whether the context has room for summaries and what follows them, in the tokens of the tasks at hand."""

from collections.abc import Sequence

from t1jax.agent.action import SYSTEM
from t1jax.agent.chat import Chat
from t1jax.agent.episode import EpisodeConfig, opening, summary_request
from t1jax.agent.history import make_history
from t1jax.experiment import ConfigError
from t1jax.types import Task

HEADINGS = 200  # bytes around a screen, and around what was left out of it


def check_room(config: EpisodeConfig, chat: Chat, tasks: Sequence[Task]) -> None:
    """Raises ConfigError where a summary could be cut, or where a chunk could be summarized as soon as it opens."""
    if not config.compact_below:
        return

    def tokens(text: str, system: str = SYSTEM[config.protocol]) -> int:
        return len(make_history(config.history, chat, system, text).prompt())

    asked = tokens(
        summary_request(config.max_summary), ""
    )  # as a message of its own, which is no less
    if config.max_reply + asked + config.max_summary > config.compact_below:
        raise ConfigError(
            f"episode.compact_below={config.compact_below} free tokens do not hold max_reply={config.max_reply}, {asked} "
            f"that ask for a summary, and max_summary={config.max_summary}: raise it, or lower those"
        )
    room = config.max_context - config.compact_below
    # A token has at least a byte, so most instructions need not be encoded.
    around = tokens(opening("", "", "a")) + config.max_summary + config.max_output_bytes + HEADINGS
    for task in tasks:
        if around + len(task.instruction.encode()) < room:
            continue
        needed = around + tokens(task.instruction) - tokens("")
        if needed >= room:
            raise ConfigError(
                f"episode.max_context={config.max_context} less compact_below={config.compact_below} does not hold the "
                f"{needed} tokens that may open a chunk of {task.name}: its instruction, a summary, a screen"
            )
