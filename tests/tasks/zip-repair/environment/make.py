import random
import zipfile

rng = random.Random(3)
NAMES = (
    "notes/one.txt",
    "notes/two.txt",
    "plan.csv",
    "photos/raw.bin",
    "photos/empty.txt",
    "z/last.txt",
)
with zipfile.ZipFile("backup.zip", "w") as archive:
    for name in NAMES:
        text = "".join(f"{name} {i} {rng.random()}\n" for i in range(60))
        kind = zipfile.ZIP_STORED if name.endswith(".bin") else zipfile.ZIP_DEFLATED
        info = zipfile.ZipInfo(name, (2024, 5, 1, 12, 0, 0))
        archive.writestr(info, "" if "empty" in name else text, kind)
    places = {info.filename: info.header_offset for info in archive.infolist()}
with open("backup.zip", "r+b") as file:
    file.seek(places["plan.csv"] + 30 + len("plan.csv") + 700)
    byte = file.read(1)[0]
    file.seek(-1, 1)
    file.write(bytes([byte ^ 0x10]))
    file.truncate(places["z/last.txt"] + 400)
