"""What is kept of a command's output: the first and the last bytes, and how many lay between."""


class Output:
    """Collects a stream of any length in constant memory. `limit` in bytes, half for each end."""

    def __init__(self, limit: int):
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    def add(self, data: bytes) -> None:
        self._total += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data[-self._half :] if self._half else b""
        if len(self._tail) > self._half:
            del self._tail[: len(self._tail) - self._half]

    def text(self) -> str:
        """Decoded UTF-8; invalid bytes and NUL become U+FFFD; cut on code points, the cut is named."""
        head, tail = bytes(self._head), bytes(self._tail)
        if len(head) + len(tail) == self._total:
            return _decode(head + tail)
        head, tail = head[: _whole(head)], tail[_continuation(tail) :]
        omitted = self._total - len(head) - len(tail)
        return f"{_decode(head)}\n[... {omitted} bytes omitted ...]\n{_decode(tail)}"


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "replace").replace("\0", "\ufffd")


def _whole(data: bytes) -> int:
    """The length without a code point cut at the end."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:  # a lead byte: 2, 3 or 4 bytes long
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if length > back else len(data)
        if byte < 0x80:
            break
    return len(data)


def _continuation(data: bytes) -> int:
    """How many continuation bytes of a cut code point stand at the start (at most 3)."""
    count = 0
    while count < min(3, len(data)) and data[count] & 0xC0 == 0x80:
        count += 1
    return count
