"""Frames on the socket between the host and a sandbox: a JSON object and raw bytes, both length-prefixed.

Imported by the host and by the stand-alone supervisor, hence standard library only.
"""

import json
import socket
import struct

PREFIX = struct.Struct("!II")  # bytes of JSON, bytes of payload
MAX_PAYLOAD = 256 << 20


def pack(message: dict, payload: bytes = b"") -> bytes:
    """One frame. Raises ValueError when the payload is above MAX_PAYLOAD bytes."""
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(f"{len(payload)} bytes in one message, at most {MAX_PAYLOAD} fit")
    text = json.dumps(message).encode()
    return PREFIX.pack(len(text), len(payload)) + text + payload


def send(sock: socket.socket, message: dict, payload: bytes = b"") -> None:
    """Sends one frame, blocking."""
    sock.sendall(pack(message, payload))


def receive(sock: socket.socket) -> tuple[dict, bytes]:
    """Reads one frame, blocking. Raises EOFError when the other side is gone."""
    text_size, payload_size = PREFIX.unpack(_exactly(sock, PREFIX.size))
    return parse(_exactly(sock, text_size)), _exactly(sock, payload_size)


def parse(text: bytes) -> dict:
    """The JSON object of a frame."""
    return json.loads(text)


def _exactly(sock: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = sock.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError("the other side closed the connection")
        parts += part
    return bytes(parts)
