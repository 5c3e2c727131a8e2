"""How every main starts and how it fails: bad input is one clear line on stderr and exit code 1."""

import errno
import fcntl
import os
import sys
from collections.abc import Callable
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

from t1jax.agent.task import TaskError
from t1jax.agent.template import TemplateError
from t1jax.checkpoint import CheckpointError
from t1jax.experiment import ConfigError
from t1jax.guard import GuardError
from t1jax.mesh import MeshError
from t1jax.metrics import MetricsError
from t1jax.model.hf_config import HFError
from t1jax.rollout.collect import CollectError
from t1jax.rollout.store import StoreError
from t1jax.sandbox.protocol import SandboxError
from t1jax.types import SamplerError

EXPECTED = (
    *(ConfigError, TaskError, CheckpointError, CollectError, StoreError, GuardError, MetricsError),
    *(HFError, MeshError, SandboxError, SamplerError, TemplateError, OSError),
)


def define_config_flags() -> tuple[flags.FlagHolder, flags.FlagHolder]:
    """--config=FILE[:arg] with --config.key=value overrides, and --workdir."""
    config = config_flags.DEFINE_config_file("config", None, "Experiment file.", lock_config=True)
    workdir = flags.DEFINE_string("workdir", None, "The run's folder.")
    flags.mark_flags_as_required(["config", "workdir"])
    return config, workdir


def run(main: Callable[[], None]) -> None:
    """Parses the flags, runs `main`, and turns what a user can cause into one line and exit code 1."""

    def parse(argv):
        try:
            return flags.FLAGS(argv)
        except flags.Error as error:
            fail(f"flags: {error}")
        except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
            fail(f"--config: {error}")

    def guarded(argv):
        logging.set_verbosity(logging.WARNING)  # Orbax tells a lot
        if len(argv) > 1:
            fail(f"unexpected argument {argv[1]!r}")
        try:
            main()
        except EXPECTED as error:
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                fail(f"the disk is full ({error}): free space and run the same command again")
            fail(str(error))
        except KeyboardInterrupt:
            fail("interrupted")

    app.run(guarded, flags_parser=parse)


def fail(message: str):
    """Ends the process with one line on stderr."""
    print("error: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(1)


def workdir_path(name: str) -> Path:
    """The run's folder, made if need be and held by this process until it ends.

    Raises ConfigError where a file stands in its place or another process holds it.
    """
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"--workdir={name} is a file, not a folder") from None
    try:
        fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"{name} is in use by another run: wait for it, or name another folder"
        ) from None
    except OSError as error:  # a file system without locks
        print(f"warning: {name} cannot be locked ({error.strerror})", file=sys.stderr)
    return path
