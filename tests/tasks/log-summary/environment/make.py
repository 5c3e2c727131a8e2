import gzip
import random
from pathlib import Path

rng = random.Random(5)
folder = Path("logs")
folder.mkdir()
for service, count in (("mail", 240), ("web", 310), ("queue", 90)):
    for part, opened in ((".log", open), (".log.1.gz", gzip.open)):
        with opened(folder / f"{service}{part}", "wt") as file:
            for _ in range(count):
                level = rng.choices(("DEBUG", "INFO", "WARN", "ERROR"), (4, 8, 2, 1))[0]
                time = f"2024-05-{rng.randint(1, 9):02}T{rng.randint(0, 23):02}:00:00Z"
                file.write(f"{time} {level} request of INFO 2024-05-01 {rng.random():.6f}\n")
                if level == "ERROR":
                    file.write("  ERROR in line 7\n\tcaused by ERROR 5\n")
