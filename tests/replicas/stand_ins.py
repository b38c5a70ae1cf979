"""The least that a fleet can be made of, as programs: `gateway PORT`, which keeps a list of workers, and
`replica PORT [EXIT_CODE]`, which is ready at once, or ends at once with that code."""

from __future__ import annotations

import json
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlparse

WORKERS: list[str] = []


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        workers = {"workers": [{"url": url, "is_healthy": True} for url in WORKERS]}
        self._answer(workers if self.path == "/workers" else {})

    def do_POST(self) -> None:
        asked = urlparse(self.path)
        url = parse_qs(asked.query)["url"][0]
        if asked.path == "/add_worker":
            WORKERS.append(url)
        elif url in WORKERS:
            WORKERS.remove(url)
        self._answer({})

    def _answer(self, body: dict) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if __name__ == "__main__":
    if len(sys.argv) > 3:
        sys.exit(int(sys.argv[3]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
