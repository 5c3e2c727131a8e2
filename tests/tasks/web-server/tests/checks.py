import http.client
import json


def get(path):
    """(status, media type, body) of a request."""
    connection = http.client.HTTPConnection("127.0.0.1", 8080, timeout=5)
    connection.request("GET", path)
    answer = connection.getresponse()
    kind = answer.getheader("Content-Type", "").partition(";")[0]
    return answer.status, kind, answer.read(100_000).decode()


def test_health():
    status, kind, body = get("/health")
    assert (status, kind, json.loads(body)) == (200, "application/json", {"status": "ok"})


def test_index():
    assert get("/") == (200, "text/html", "<h1>Harbour office</h1>\n")


def test_file_in_a_folder():
    status, _, body = get("/docs/berths.csv")
    assert (status, body) == (200, "berth,depth\nA,7\nB,9\n")


def test_missing_path():
    status, _, body = get("/docs/nothing")
    assert (status, body) == (404, "<h1>No such berth</h1>\n")


def test_nothing_outside_is_served():
    for path in (
        "/../secret.txt",
        "/%2e%2e/secret.txt",
        "//app/secret.txt",
        "/docs/../../secret.txt",
    ):
        status, _, body = get(path)
        assert status in (400, 403, 404) and "public" not in body
