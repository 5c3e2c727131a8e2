#!/bin/bash
# Only the steps of the level are unknown: two bits each before lzma.
set -e
cd /app
cat >unpack <<'END'
#!/usr/bin/python3
import lzma, sys
data = lzma.decompress(sys.stdin.buffer.read())
level = 5000
for i in range(20000):
    level += (data[i // 4] >> 2 * (i % 4) & 3) - 1
    print(f"time={1700000060 + 60 * i} station=north level={level / 1000:.3f}m state={'ok' if level < 5020 else 'high'}")
END
chmod +x unpack
python3 - <<'END'
import lzma, re
levels = [5000] + [int(x.replace(".", "")) for x in re.findall(r"level=([\d.]+)m", open("readings.txt").read())]
steps = [b - a + 1 for a, b in zip(levels, levels[1:])]
data = bytes(sum(s << 2 * j for j, s in enumerate(steps[i : i + 4])) for i in range(0, len(steps), 4))
open("packed", "wb").write(lzma.compress(data))
END
./unpack <packed | cmp - readings.txt
