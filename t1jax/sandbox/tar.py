"""Files as tar streams, the form in which a Docker daemon gives and takes them."""

import io
import stat
import tarfile
import tempfile
import time
from pathlib import Path
from typing import IO

from t1jax.sandbox.protocol import SandboxError

MAX_PUT = 256 << 20  # bytes
SPOOL = 1 << 20  # bytes kept in memory; a file takes what is above


def pack(path: str, source: Path, folders: list[str]) -> IO[bytes]:
    """A host file or tree as what shall stand at `path`, behind the `folders` it needs. Owner is root.

    Whoever unpacks it at / replaces what stands in the way, without following it. Mode bits are kept, links
    are links. Raises SandboxError for anything else, and above MAX_PUT bytes.
    """
    paths = [source, *sorted(source.rglob("*"))] if source.is_dir() else [source]
    spool, left = tempfile.SpooledTemporaryFile(SPOOL), MAX_PUT  # noqa: SIM115  the caller closes it
    with tarfile.open(fileobj=spool, mode="w") as tar:
        for folder in folders:
            tar.addfile(_entry(folder, tarfile.DIRTYPE, 0o755))
        for file in paths:
            status, name = file.lstat(), f"{path}/{file.relative_to(source)}".removesuffix("/.")
            mode = stat.S_IMODE(status.st_mode) & 0o777
            if stat.S_ISLNK(status.st_mode):
                tar.addfile(_entry(name, tarfile.SYMTYPE, mode, link=str(file.readlink())))
            elif stat.S_ISDIR(status.st_mode):
                tar.addfile(_entry(name, tarfile.DIRTYPE, mode))
            elif stat.S_ISREG(status.st_mode):
                left -= status.st_size
                if left < 0:
                    raise SandboxError(f"put: {source} has more than {MAX_PUT} bytes")
                with file.open("rb") as content:
                    tar.addfile(_entry(name, tarfile.REGTYPE, mode, status.st_size), content)
            else:
                raise SandboxError(f"put: {file} is neither a file, a folder nor a link")
    spool.seek(0)
    return spool


def fresh_folder(path: str, folders: list[str]) -> IO[bytes]:
    """An empty folder at `path`: first a file, in whose favour all that stands there goes."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for folder in folders:
            tar.addfile(_entry(folder, tarfile.DIRTYPE, 0o755))
        tar.addfile(_entry(path, tarfile.REGTYPE, 0o600))
        tar.addfile(_entry(path, tarfile.DIRTYPE, 0o755))
    data.seek(0)
    return data


def read_file(stream: IO[bytes], max_bytes: int) -> bytes | None:
    """The bytes of the one regular file in a stream; None for anything else, or above `max_bytes`.

    No more of the stream is read than that takes. Raises tarfile.TarError.
    """
    with tarfile.open(fileobj=stream, mode="r|") as tar:
        entry = tar.next()
        if entry is None or not entry.isreg() or entry.size > max_bytes:
            return None
        return tar.extractfile(entry).read()


def _entry(path: str, kind: bytes, mode: int, size: int = 0, link: str = "") -> tarfile.TarInfo:
    entry = tarfile.TarInfo(path.strip("/"))
    entry.type, entry.mode, entry.size, entry.linkname = kind, mode, size, link
    entry.mtime = int(time.time())
    return entry
