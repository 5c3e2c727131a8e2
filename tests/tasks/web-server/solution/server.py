import http.server
import json
import mimetypes
from pathlib import Path
from urllib.parse import unquote, urlsplit

SITE = Path("/app/site")


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        file = (SITE / (path.lstrip("/") or "index.html")).resolve()
        if path == "/health":
            self.answer(200, "application/json", json.dumps({"status": "ok"}).encode())
        elif file.is_file() and file.is_relative_to(SITE):
            self.answer(200, mimetypes.guess_type(file.name)[0] or "text/plain", file.read_bytes())
        else:
            self.answer(404, "text/html", (SITE / "404.html").read_bytes())

    def answer(self, status, kind, body):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code="-", size="-"):
        with open("/app/access.log", "a") as log:
            log.write(f"{self.command} {self.path} {int(code)}\n")


http.server.ThreadingHTTPServer(("127.0.0.1", 8080), Handler).serve_forever()
