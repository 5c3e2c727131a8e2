#!/bin/bash
python3 - <<'END'
import csv, datetime, decimal, json
with open("/app/orders.csv", encoding="utf-8-sig", newline="") as file:
    rows = {row["number"]: row for row in csv.DictReader(file, delimiter=";")}
report = {}
for row in rows.values():
    if row["status"].lower() == "cancelled" or not row["amount"]:
        continue
    name = " ".join(row["customer"].split())
    amount = decimal.Decimal(row["amount"].replace(".", "").replace(",", "."))
    day = datetime.datetime.strptime(row["date"], "%d.%m.%Y").date().isoformat()
    orders, total, last = report.get(name, (0, 0, ""))
    report[name] = orders + 1, total + amount, max(last, day)
report = {n: {"orders": o, "total": f"{t:.2f}", "last": d} for n, (o, t, d) in report.items()}
with open("/app/report.json", "w") as file:
    json.dump(report, file)
END
