#!/bin/bash
python3 - <<'END'
import json
jobs = json.load(open("/app/jobs.json"))
best = [10**9, None]
def search(plan, free):  # every order in which jobs may begin, each as early as it can
    end = max(free.values())
    open_jobs = [j for j in jobs if j not in plan]
    left = sum(jobs[j]["hours"] for j in open_jobs)
    if max(end, (sum(free.values()) + left + 1) // 2) >= best[0]:
        return
    if not open_jobs:
        best[:] = end, dict(plan)
        return
    for job in open_jobs:
        if all(a in plan for a in jobs[job]["after"]):
            ready = max((plan[a][1] + jobs[a]["hours"] for a in jobs[job]["after"]), default=0)
            for machine in (1, 2):
                if jobs[job].get("machine", machine) == machine:
                    start = max(ready, free[machine])
                    search({**plan, job: (machine, start)}, {**free, machine: start + jobs[job]["hours"]})
search({}, {1: 0, 2: 0})
plan = {job: {"machine": m, "start": s} for job, (m, s) in best[1].items()}
json.dump(plan, open("/app/plan.json", "w"))
open("/app/hours.txt", "w").write(f"{best[0]}\n")
END
