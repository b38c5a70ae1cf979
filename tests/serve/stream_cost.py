"""What a streamed token costs the server's process: many streams at once from the scripted core, read by a client that
does nothing but count. As a program it prints the cost:

    python -m tests.serve.stream_cost --streams 500 --tokens 100
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import dataclass

import psutil

from tests.serve.test_server import Program, program


@dataclass(frozen=True)
class Cost:
    """Of all streams together. Times are processor time, in microseconds a token, of the server's and the engine's
    process; the set-up of the requests is in them."""

    tokens: int
    events: int
    server: float
    engine: float


class _Reader(asyncio.Protocol):
    """Sends a request, counts the events of its answer."""

    def __init__(self, request: bytes):
        self.request, self.events, self.tail = request, 0, b""
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport) -> None:
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.events += data.count(b"data: ")
        self.tail = (self.tail + data)[-64:]
        if b"data: [DONE]" in self.tail:
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None or b"data: [DONE]" not in self.tail:
            self.done.set_exception(error or EOFError("the stream ended without [DONE]"))
        elif not self.done.done():
            self.done.set_result(self.events)


def request_of(tokens: int) -> bytes:
    body = json.dumps({"model": "fake/tiny", "messages": [{"role": "user", "content": "hello"}], "stream": True,
                       "max_tokens": tokens, "ignore_eos": True}).encode()
    return (b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body)) + body


async def read_streams(port: int, streams: int, tokens: int) -> int:
    """Events of all streams."""
    loop, readers = asyncio.get_running_loop(), []
    for _ in range(streams):
        _, reader = await loop.create_connection(lambda: _Reader(request_of(tokens)), "127.0.0.1", port)
        readers.append(reader)
    return sum(await asyncio.gather(*(reader.done for reader in readers)))


def measure(server: Program, streams: int, tokens: int) -> Cost:
    processes = (psutil.Process(server.process.pid), server.engine())
    before = [_seconds(process) for process in processes]
    events = asyncio.run(read_streams(server.port, streams, tokens))
    own, engine = (1e6 * (_seconds(process) - old) / (streams * tokens)
                   for process, old in zip(processes, before, strict=True))
    return Cost(streams * tokens, events, own, engine)


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def scripted(streams: int, step_seconds: float) -> dict:
    """Options of the scripted core that runs all streams at once, one token a step."""
    return {"max_num_seqs": streams, "step_seconds": step_seconds, "max_model_len": 100_000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--step-seconds", type=float, default=0.2)
    given = parser.parse_args()
    with program(scripted(given.streams, given.step_seconds)) as server:
        server.until("/readyz", 200)
        cost = measure(server, given.streams, given.tokens)
    print(f"{given.streams} streams, {cost.tokens} tokens in {cost.events} events: {cost.server:.1f} us of the server's"
          f" processor time a token, {cost.engine:.1f} us of the scripted engine's")


if __name__ == "__main__":
    main()
