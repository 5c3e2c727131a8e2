import random

rng = random.Random(11)
time, level = 1_700_000_000, 5000
for _ in range(20_000):
    time += 60
    level += rng.choice((-1, 0, 0, 1))
    print(
        f"time={time} station=north level={level / 1000:.3f}m state={'ok' if level < 5020 else 'high'}"
    )
