"""The least that a fleet can be made of, as programs: `gateway PORT JOURNAL FAULTS`, which keeps a list of workers, and
`replica PORT [EXIT_CODE]`, which is ready at once, or ends at once with that code.

JOURNAL: a file to which each call of the gateways of one fleet is added, "add 3" for the third time that one was told
to take a replica ("remove 1", "start 1"). FAULTS, as JSON: what happens at some of them, {"add 3": "die"}.

    refuse    nothing is done, and the answer is 500
    die       nothing is done, and the program ends
    hang up   it is done, and there is no answer
    stick     a replica is taken, and stays unhealthy
    shout     it is done after a line of the log that is longer than any buffer
    SECONDS   it is done, and answered, later
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, urlparse

SHOUT = 3 * 2**20  # bytes


class Handler(BaseHTTPRequestHandler):
    workers: ClassVar[dict[str, bool]] = {}  # is it healthy?
    journal: ClassVar[Path]
    faults: ClassVar[dict[str, str | float]]
    lock = threading.Lock()

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        workers = {"workers": [{"url": url, "is_healthy": healthy} for url, healthy in self.workers.items()]}
        self._answer(workers if self.path == "/workers" else {})

    def do_POST(self) -> None:
        asked = urlparse(self.path)
        kind, url = asked.path[1:].partition("_")[0], parse_qs(asked.query)["url"][0]
        fault = self.fault(kind)
        if fault == "die":
            os._exit(1)
        if fault == "refuse":
            return self._answer({}, 500)
        if fault == "shout":
            print(json.dumps({"level": "WARN", "message": "x" * SHOUT}), flush=True)
            print(json.dumps({"level": "WARN", "message": "and goes on"}), flush=True)
        if isinstance(fault, float):
            time.sleep(fault)
        if kind == "add":
            self.workers[url] = fault != "stick"
        else:
            self.workers.pop(url, None)
        if fault == "hang up":
            self.close_connection = True
        else:
            self._answer({})

    @classmethod
    def fault(cls, kind: str) -> str | float:
        with cls.lock:
            before = cls.journal.read_text().splitlines() if cls.journal.exists() else []
            entry = f"{kind} {sum(line.startswith(kind) for line in before) + 1}"
            with cls.journal.open("a") as file:
                file.write(entry + "\n")
        return cls.faults.get(entry, "")

    def _answer(self, body: dict, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if __name__ == "__main__":
    if sys.argv[1] == "gateway":
        Handler.journal, Handler.faults = Path(sys.argv[3]), json.loads(sys.argv[4])
        if Handler.fault("start") == "die":
            sys.exit(1)
    elif len(sys.argv) > 3:
        sys.exit(int(sys.argv[3]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
