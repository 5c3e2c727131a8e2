#!/bin/bash
python3 - <<'END'
import configparser, json, re
def value(text):
    if re.fullmatch(r"-?(0|[1-9]\d*)", text):
        return int(text)
    return {"true": True, "false": False}.get(text, text)
ini = configparser.ConfigParser(interpolation=None)
ini.read("/app/conf/defaults.ini")
places = {"defaults": {(s, k): value(v) for s in ini.sections() for k, v in ini[s].items()}}
site = json.load(open("/app/conf/site.json"))
places["site"] = {(s, k): v for s in site for k, v in site[s].items()}
places["local"] = {}
for line in open("/app/conf/local.env"):
    if found := re.fullmatch(r"SVC_([A-Z]+)_(\w+)=(.*)\n", line):
        text = found[3]
        quoted = text[:1] in ("'", '"') and text[-1:] == text[0]
        places["local"][found[1].lower(), found[2].lower()] = text[1:-1] if quoted else value(text)
merged, conflicts = {}, []
for section, key in dict.fromkeys(k for p in places.values() for k in p):
    have = {n: p[section, key] for n, p in places.items() if (section, key) in p}
    winner = list(have)[-1]
    given = {json.dumps(v) for v in have.values() if v is not None}
    if have[winner] is not None:
        merged.setdefault(section, {})[key] = have[winner]
    if len(given) > 1:
        conflicts.append(f"{section}.{key}: {winner}\n")
json.dump(merged, open("/app/merged.json", "w"))
open("/app/conflicts.txt", "w").write("".join(sorted(conflicts)))
END
