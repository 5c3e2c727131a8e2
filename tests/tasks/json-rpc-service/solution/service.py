import json
import socketserver

kept = {}


def put(key, value):
    kept[key] = value
    return True


METHODS = {"add": lambda a, b: a + b, "put": put, "get": lambda key: kept.get(key)}


def answer(line):
    number = None
    try:
        request = json.loads(line)
        if not isinstance(request, dict) or not isinstance(request.get("method"), str):
            return fail(None, -32600)
        number = request.get("id")
        if request["method"] not in METHODS:
            return fail(number, -32601)
        result = METHODS[request["method"]](*request.get("params", ()))
    except ValueError:
        return fail(None, -32700)
    except TypeError:
        return fail(number, -32602)
    return {"jsonrpc": "2.0", "id": number, "result": result} if "id" in request else None


def fail(number, code):
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": "refused"}}


class Client(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            if said := answer(line):
                self.wfile.write(json.dumps(said).encode() + b"\n")


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True


Server(("127.0.0.1", 7070), Client).serve_forever()
