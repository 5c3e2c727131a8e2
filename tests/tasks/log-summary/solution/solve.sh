#!/bin/bash
python3 - <<'END'
import collections, gzip, json, pathlib, re
levels = dict.fromkeys(("DEBUG", "INFO", "WARN", "ERROR"), 0)
days, services = collections.Counter(), collections.Counter()
for path in pathlib.Path("/app/logs").iterdir():
    for line in (gzip.open if path.suffix == ".gz" else open)(path, "rt"):
        if found := re.match(r"(\d{4}-\d\d-\d\d)T[\d:]{8}Z (\w+) ", line):
            levels[found[2]] += 1
            services[path.name.split(".")[0]] += 1
            days[found[1]] += found[2] == "ERROR"
summary = {"entries": sum(levels.values()), "by_level": levels}
summary |= {"errors_by_day": {day: n for day, n in days.items() if n}}
summary |= {"busiest_service": services.most_common(1)[0][0]}
pathlib.Path("/app/summary.json").write_text(json.dumps(summary))
END
