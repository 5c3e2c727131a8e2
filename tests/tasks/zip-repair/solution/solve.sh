#!/bin/bash
python3 - <<'END'
import pathlib, struct, zipfile, zlib
data = pathlib.Path("/app/backup.zip").read_bytes()
lost, at = [], 0
with zipfile.ZipFile("/app/repaired.zip", "w", zipfile.ZIP_DEFLATED) as repaired:
    while data[at : at + 4] == b"PK\3\4":
        method, crc, packed, size, name_len, extra = struct.unpack("<8xH4xIIIHH", data[at : at + 30])
        start = at + 30 + name_len + extra
        name, body = data[at + 30 : at + 30 + name_len].decode(), data[start : start + packed]
        try:
            body = zlib.decompress(body, -15) if method else body
        except zlib.error:
            body = b""
        if len(body) == size and zlib.crc32(body) == crc:
            path = pathlib.Path("/app/restored", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body)
            repaired.writestr(name, body)
        else:
            lost.append(name + "\n")
        at = start + packed
pathlib.Path("/app/lost.txt").write_text("".join(sorted(lost)))
END
