import json
from pathlib import Path

import pytest

REPORT = {
    "Anna Berg": {"orders": 3, "total": "1234.80", "last": "2024-02-29"},
    "anna berg": {"orders": 1, "total": "5.00", "last": "2024-01-01"},
    'Boot; Seil "GmbH"': {"orders": 1, "total": "89.99", "last": "2023-12-02"},
    "Jörg Ünal": {"orders": 2, "total": "1000010.01", "last": "2023-11-10"},
    "Boot": {"orders": 2, "total": "0.00", "last": "2023-10-31"},
}


@pytest.fixture
def report():
    return json.loads(Path("/app/report.json").read_text("utf-8"))


@pytest.mark.parametrize("name", REPORT)
def test_customer(report, name):
    assert report[name] == REPORT[name]


def test_no_other_customers(report):
    assert set(report) == set(REPORT)


def test_source_is_kept():
    data = Path("/app/orders.csv").read_bytes()
    assert data.startswith(b"\xef\xbb\xbfnumber;") and data.count(b"\r\n") == 16
