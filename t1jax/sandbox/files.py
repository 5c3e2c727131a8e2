"""File operations of the supervisor on paths the agent may have prepared: no link is ever followed.

A component that is not a folder where one is needed is replaced, so a planted link or FIFO can neither
redirect nor stop a write. Standard library only.
"""

import errno
import itertools
import os
import stat

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def read(path: str, max_bytes: int) -> bytes | None:
    """The bytes of a regular file; None for anything else, or above `max_bytes`."""
    folder, name = os.path.split(os.path.normpath(path))
    try:
        parent = _enter(folder, create=False)
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(name, flags, dir_fd=parent)
        finally:
            os.close(parent)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
            return None
        data = b""
        while len(data) <= max_bytes and (part := os.read(fd, max_bytes + 1 - len(data))):
            data += part
    finally:
        os.close(fd)
    return data if len(data) <= max_bytes else None


def write(path: str, entries: list, payload: bytes) -> None:
    """Writes a tree below `path`. entries: [relative path, kind, mode, bytes] in order, payload: their bytes.

    kind is "folder" (mode None: as it is), "file" or "link" (the bytes are the target). Raises OSError.
    """
    view, start = memoryview(payload), 0
    for relative, kind, mode, size in entries:
        data, start = view[start : start + size], start + size
        target = os.path.normpath(os.path.join(path, relative))
        if kind == "folder":
            folder = _enter(target, create=True)
            if mode is not None:
                os.fchmod(folder, mode)
            os.close(folder)
            continue
        parent, name = _enter(os.path.dirname(target), create=True), os.path.basename(target)
        try:
            _remove(parent, name)
            if kind == "link":
                os.symlink(bytes(data), name, dir_fd=parent)
            else:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                with open(os.open(name, flags, 0o600, dir_fd=parent), "wb", buffering=0) as file:
                    while data:
                        data = data[file.write(data) :]
                    os.fchmod(file.fileno(), mode)
        finally:
            os.close(parent)


def reset(path: str) -> None:
    """Makes `path` an empty folder of mode 0755 whatever stood there. Raises OSError."""
    folder = _enter(os.path.normpath(path), create=True)
    try:
        _empty(folder)
        os.fchmod(folder, 0o755)
    finally:
        os.close(folder)


def _enter(path: str, create: bool) -> int:
    """A descriptor of the folder, walked component by component."""
    fd = os.open("/", FOLDER)
    for name in path.split("/"):
        if not name:
            continue
        try:
            try:
                below = os.open(name, FOLDER, dir_fd=fd)
            except OSError:
                if not create:
                    raise
                _remove(fd, name)
                os.mkdir(name, 0o755, dir_fd=fd)
                below = os.open(name, FOLDER, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    return fd


def _remove(parent: int, name: str) -> None:
    """Removes what stands at `name`, if anything."""
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        folder = os.open(name, FOLDER, dir_fd=parent)
        try:
            _empty(folder)
        finally:
            os.close(folder)
        os.rmdir(name, dir_fd=parent)


def _empty(folder: int) -> None:
    """Removes all in a folder. Deep trees are lifted level by level: no recursion, two descriptors."""
    lifted = (f".{i}" for i in itertools.count())
    while names := os.listdir(folder):
        for name in names:
            try:
                os.unlink(name, dir_fd=folder)
                continue
            except IsADirectoryError:
                below = os.open(name, FOLDER, dir_fd=folder)
            try:
                for child in os.listdir(below):
                    try:
                        os.unlink(child, dir_fd=below)
                    except IsADirectoryError:
                        _lift(child, below, folder, lifted)
            finally:
                os.close(below)
            os.rmdir(name, dir_fd=folder)


def _lift(child: str, below: int, folder: int, names) -> None:
    for name in names:
        try:
            os.rename(child, name, src_dir_fd=below, dst_dir_fd=folder)
            return
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            continue
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:  # that name is taken: try the next
                raise
