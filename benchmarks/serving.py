"""A server under load: what is lost while its memory is swapped, and what HTTP costs.

    python benchmarks/serving.py --workdir runs/quickstart [--run rag_token] [--json FILE]

Needs the extras serve and test, and a workdir with two indexes, as the quickstart's is. A server of
`python -m rag_jax.serve`, a process of its own, answers clients that ask one question after the
other, each by a connection that stays open; it shares the machine's cores with them. Where many
ask, they write requests that were made before and keep the bytes of the replies, which are looked
at when the time has been taken: other clients run on other machines. What the server should answer
from each memory is what the Python API gave in this process. In turn:

- overhead: one client; each question is asked by the Python API and by HTTP, one after the other.
- throughput: rounds of one client and of all.
- load: requests of all clients while one of them swaps the memory now and then.
- malformed: requests that are none, also below HTTP; a sound one after each 100 must be answered.
"""

import argparse
import asyncio
import http.client
import itertools
import json
import os
import pathlib
import random
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from measuring import cpu_name

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]

import rag_jax  # noqa: E402
from rag_jax import files  # noqa: E402
from tests.serving.served import malformed  # noqa: E402

TOKEN = "change"
CLOSE = 1e-5  # of log p
MIXED = ("version", "text", "passages")  # what `wrong` finds where an answer mixes two memories
IDLE = 2  # seconds
HEAD = b"POST /answer HTTP/1.1\r\nHost: localhost\r\n"
BELOW_HTTP = (b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\r\n\r\n",
              HEAD + b"Content-Length: -1\r\n\r\n",
              HEAD + b"Transfer-Encoding: chunked\r\n\r\nz\r\n",
              b"GET / HTTP\r\nHost: localhost\r\n\r\n", b"GET /\x00 HTTP/1.1\r\n\r\n")

Expected = dict[str, dict[str, rag_jax.Answer]]  # of each memory, by question


class Client:
    """One connection, opened again before the server closes it for being idle."""

    def __init__(self, port: int):
        self._connection, self._used = http.client.HTTPConnection("127.0.0.1", port, timeout=120), 0

    def request(self, method: str, path: str, body: bytes = b"", **headers: str
                ) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json", **headers}
        if time.monotonic() > self._used + IDLE:
            self._connection.close()
        self._connection.request(method, path, body, headers)
        response = self._connection.getresponse()
        read = response.read()
        self._used = time.monotonic()
        return response.status, read

    def answer(self, question: str) -> dict[str, Any]:
        status, body = self.request("POST", "/answer", json.dumps({"question": question}).encode())
        if status != 200:
            raise ConnectionError(f"{status}: {body[:200]!r}")
        return json.loads(body)


def request(path: str, body: dict[str, Any]) -> bytes:
    """A whole request of HTTP."""
    content = json.dumps(body).encode()
    return (f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {TOKEN}\r\nContent-Length: {len(content)}\r\n\r\n"
            ).encode() + content


class Server:
    """The process of a server that is ready; it ends with the block that it is used in."""

    def __init__(self, workdir: pathlib.Path, run: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        began = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rag_jax.serve", f"--workdir={workdir}", f"--run={run}",
             f"--port={self.port}"], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "RAG_JAX_MEMORY_TOKEN": TOKEN,
                 "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])})
        for line in self._process.stdout:
            if line.startswith("ready"):
                break
        else:
            raise SystemExit(f"the server ended with {self._process.wait()}")
        threading.Thread(target=self._process.stdout.read, daemon=True).start()
        self.seconds = time.perf_counter() - began

    def resident(self) -> float:
        """MiB."""
        status = pathlib.Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s*(\d+)", status).group(1)) / 1024

    def metric(self, name: str) -> float:
        _, text = Client(self.port).request("GET", "/metrics")
        return float(re.search(rf"^{name}(?:{{.*}})? (\S+)$", text.decode(), re.MULTILINE).group(1))

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self.ended_with = self._process.wait(60)


def wrong(found: dict[str, Any], question: str, expected: Expected) -> str:
    """What of an answer is not what its memory gives; "" = nothing."""
    answer = expected[found["memory"]][question]
    if not found["version"].startswith(f"{found['memory']}:"):
        return "version"
    if found["answer"] != answer.text:
        return "text"
    if [each["id"] for each in found["passages"]] != [each.id for each in answer.passages]:
        return "passages"
    return "" if abs(found["log_prob"] - answer.log_prob) <= CLOSE else "log_prob"


def by_all(port: int, clients: int, requests: Sequence[bytes]) -> tuple[float, list[bytes]]:
    """Seconds in which so many clients make the requests, each the next that none has begun, and
    the bodies of the replies; of what was lost, the reason as b"lost: ..."."""
    replies, numbers = [b""] * len(requests), iter(range(len(requests)))

    async def work() -> None:
        reader = writer = None
        for number in numbers:
            try:
                if writer is None:
                    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
                writer.write(requests[number])
                head = await reader.readuntil(b"\r\n\r\n")
                size = re.search(rb"(?i)content-length: (\d+)", head).group(1)
                body = await reader.readexactly(int(size))
                replies[number] = body if b" 200 " in head[:16] else b"lost: " + body
            except (OSError, EOFError) as error:
                replies[number], writer = f"lost: {error!r}".encode(), None
        writer.close()

    async def all_of_them() -> float:
        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(clients)))
        return time.perf_counter() - began

    return asyncio.run(all_of_them()), replies


def overhead(port: int, rag: rag_jax.Rag, questions: list[str], pairs: int) -> dict[str, Any]:
    """Milliseconds of the Python API and of HTTP, in turn."""
    client, seconds = Client(port), {"python": [], "http": []}
    sides = {"python": lambda q: rag.ask(q), "http": client.answer}
    for number, question in zip(range(-10, pairs), itertools.cycle(questions)):
        for name in sorted(sides, reverse=bool(number % 2)):
            began = time.perf_counter()
            sides[name](question)
            if number >= 0:  # the first ones compile on Python's side
                seconds[name].append(1000 * (time.perf_counter() - began))
    quantiles = {f"{name}_{share}_ms": float(np.percentile(times, share))
                 for name, times in seconds.items() for share in (50, 99)}
    return {**quantiles, **{f"overhead_{share}_ms": quantiles[f"http_{share}_ms"] - quantiles[
        f"python_{share}_ms"] for share in (50, 99)}}


def throughput(port: int, clients: int, questions: list[str], requests: int, rounds: int
               ) -> dict[str, Any]:
    """Answers a second of one client and of all, and how far their answers are apart."""
    rates, given = {1: [], clients: []}, {1: {}, clients: {}}
    prepared = [request("/answer", {"question": question}) for question in questions]
    for _ in range(rounds):
        for count, into in given.items():
            done = max(len(questions), requests * count // clients)
            seconds, replies = by_all(port, count, [
                prepared[number % len(prepared)] for number in range(done)])
            rates[count].append(done / seconds)
            for question, reply in zip(itertools.cycle(questions), replies):
                found = json.loads(reply)
                into[question] = (found["answer"], found["log_prob"])
    one, many = given.values()
    return {"one_per_second": statistics.median(rates[1]),
            "all_per_second": statistics.median(rates[clients]),
            "ratio": statistics.median(b / a for a, b in zip(*rates.values(), strict=True)),
            "other_answers": sum(one[q][0] != many[q][0] for q in questions),
            "log_prob_difference": max(abs(one[q][1] - many[q][1]) for q in questions),
            "of_log_prob": max(abs(one[q][1] / many[q][1] - 1) for q in questions)}


def load(server: Server, options: argparse.Namespace, questions: list[str], expected: Expected
         ) -> dict[str, Any]:
    """Requests of all clients with swaps among them."""
    names, kinds, before = sorted(expected), [], server.metric("rag_jax:compilations_total")
    every, answered = options.requests // options.swaps, dict.fromkeys(expected, 0)
    asked: list[tuple[str, bytes]] = []  # the question, "" of a swap, and its request
    for number in range(options.requests):
        swap, rest = divmod(number, every)
        if rest == every // 2 and swap < options.swaps:
            asked.append(("", request("/memory", {"swap": names[swap % len(names)]})))
        question = questions[number % len(questions)]
        asked.append((question, request("/answer", {"question": question})))
    seconds, replies = by_all(server.port, options.clients, [each for _, each in asked])
    for (question, _), reply in zip(asked, replies, strict=True):
        if reply.startswith(b"lost"):
            kinds.append(reply[:200].decode(errors="replace"))
        elif question:
            found = json.loads(reply)
            answered[found["memory"]] += 1
            kinds.append(wrong(found, question, expected))
    return {"requests": len(kinds), "swaps": options.swaps, "seconds": seconds,
            "answered": answered, "lost": sum(kind.startswith("lost") for kind in kinds),
            "mixed": sum(kind in MIXED for kind in kinds),
            "log_prob_apart": kinds.count("log_prob"),
            "of_these": sorted({kind for kind in kinds if kind})[:5],
            "compilations": server.metric("rag_jax:compilations_total") - before}


def fuzz(server: Server, requests: int, question: str) -> dict[str, Any]:
    """Malformed requests: how many are not refused with a reason, and what they leave behind."""
    draw, client, bad = random.Random(0), Client(server.port), []
    memory = []
    for number in range(requests):
        if number % 100 == 0:
            client.answer(question)
            memory.append(server.resident())
        if number % 10 == 9:
            content = draw.choice(BELOW_HTTP)
            with socket.create_connection(("127.0.0.1", server.port), 60) as raw:
                raw.sendall(content)
                raw.shutdown(socket.SHUT_WR)
                reply = b"".join(iter(lambda raw=raw: raw.recv(65536), b""))
            status, said = reply[9:12].decode() or "none", reply.partition(b"\r\n\r\n")[2]
        else:
            route, content = malformed(draw)
            status, body = client.request("POST", route, content)
            status, said = str(status), json.loads(body).get("error", {}).get("message")
        if not (status.startswith("4") and said):
            bad.append((status, content[:80]))
    client.answer(question)
    return {"requests": requests, "not_refused": len(bad), "of_these": [str(b) for b in bad[:5]],
            "resident_mib": [memory[1], memory[len(memory) // 2], server.resident()]}


def measured(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    figures = {"cpu": cpu_name(), "cores": os.cpu_count(), "run": options.run,
               "seconds until ready": server.seconds}
    print(figures, flush=True)
    there = json.loads(Client(server.port).request("GET", "/memory")[1])
    rag = rag_jax.load(options.workdir, options.run)
    questions = [each.question for each in rag.questions("test")[:options.questions]]
    expected: Expected = {}
    for name in there["there"]:
        rag.swap(name)
        expected[name] = dict(zip(questions, rag.ask(questions), strict=True))
    rag.swap(there["current"])
    for name, measure in {
            "overhead": lambda: overhead(server.port, rag, questions, options.pairs),
            "throughput": lambda: throughput(server.port, options.clients, questions,
                                             options.throughput, options.rounds),
            "load": lambda: load(server, options, questions, expected),
            "malformed": lambda: fuzz(server, options.malformed, questions[0])}.items():
        figures[name] = measure()
        print(name, json.dumps(figures[name], indent=1), flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--run", default="rag_token")
    parser.add_argument("--questions", type=int, default=64, help="of the test set, in turn")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=10_000, help="while the memory is swapped")
    parser.add_argument("--swaps", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=500, help="of Python and HTTP")
    parser.add_argument("--throughput", type=int, default=1000, help="requests of all in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--malformed", type=int, default=2000)
    parser.add_argument("--json", type=pathlib.Path, help="write the figures there, too")
    options = parser.parse_args()

    with Server(options.workdir, options.run) as server:
        figures = measured(server, options)
    figures["ended with"] = server.ended_with
    if options.json:
        files.write_json(options.json, figures)


if __name__ == "__main__":
    main()
