import json
import socket

import pytest


class Client:
    def __init__(self):
        self.socket = socket.create_connection(("127.0.0.1", 7070), timeout=5)
        self.lines = self.socket.makefile()

    def send(self, line):
        self.socket.sendall(line.encode() + b"\n")

    def ask(self, line):
        self.send(line)
        return json.loads(self.lines.readline(100_000))

    def call(self, method, *params, number=1):
        request = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        return self.ask(json.dumps(request))


@pytest.fixture
def client():
    client = Client()
    yield client
    client.socket.close()


def test_add(client):
    assert client.call("add", 2, 40, number="x") == {"jsonrpc": "2.0", "id": "x", "result": 42}


def test_put_and_get_across_clients(client):
    assert client.call("get", "tests/a")["result"] is None
    assert client.call("put", "tests/a", [1, {"b": 2}])["result"] is True
    assert Client().call("get", "tests/a")["result"] == [1, {"b": 2}]


def test_connection_stays_open(client):
    assert [client.call("add", i, i, number=i)["result"] for i in range(50)] == list(
        range(0, 100, 2)
    )


def test_clients_do_not_wait_for_each_other(client):
    idle = Client()
    assert client.call("add", 1, 1)["result"] == 2
    assert idle.call("add", 1, 2)["result"] == 3


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("{nonsense", -32700),
        ("[1]", -32600),
        ('{"jsonrpc": "2.0", "id": 3, "method": "divide", "params": [1, 2]}', -32601),
        ('{"jsonrpc": "2.0", "id": 3, "method": "add", "params": [1]}', -32602),
    ],
)
def test_error(client, line, code):
    said = client.ask(line)
    assert said["error"]["code"] == code and "result" not in said


def test_notification_is_carried_out_and_not_answered(client):
    client.send('{"jsonrpc": "2.0", "method": "put", "params": ["tests/n", 5]}')
    assert client.call("get", "tests/n", number=9) == {"jsonrpc": "2.0", "id": 9, "result": 5}
