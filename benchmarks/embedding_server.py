"""What HTTP costs small encoders: clients that send one text at a time, and the same texts offline in the same run.

    python -m benchmarks.embedding_server --model path/of/all-MiniLM-L6-v2

Each of `--clients` sends its next text when it has the embedding of the last. The two sides take turns `--repeat`
times; reported are medians of texts/s, and their ratio. The clients run on the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from benchmarks.report import show
from benchmarks.serving import running
from inflight import LLM
from inflight.bench.server import ServerAddress
from inflight.bench.workload import WORDS

HEAD = "POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


def make_texts(count: int, low: int, high: int, seed: int) -> list[str]:
    """Of about so many tokens: each of the words is one."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(low, high) - 2)) for _ in range(count)]


async def embed_all(address: ServerAddress, texts: list[str], num_clients: int, encoding: str) -> float:
    """Texts/s."""
    bodies = iter([json.dumps({"input": text, "encoding_format": encoding}).encode() for text in texts])
    start = time.perf_counter()
    await asyncio.gather(*(_client(address, bodies) for _ in range(num_clients)))
    return len(texts) / (time.perf_counter() - start)


async def _client(address: ServerAddress, bodies: Iterator[bytes]) -> None:
    place = urlsplit(address.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    for body in bodies:
        writer.write((HEAD % len(body)).encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"a request failed: {answer.decode()}")
        size = next(line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(size.partition(b":")[2]))
    writer.close()
    await writer.wait_closed()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--length", default="10:250", help="tokens")
    parser.add_argument("--encoding", choices=("float", "base64"), default="base64")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    low, high = map(int, args.length.split(":"))
    llm = LLM(args.model, show_progress=False)
    served, offline = [], []
    with running(args.model, ["--no-log-requests"]) as (address, _):
        for index in range(-1, args.repeat):
            count = args.texts if index >= 0 else args.clients * 2
            texts = make_texts(count, low, high, index)
            speed = asyncio.run(embed_all(address, texts, args.clients, args.encoding))
            start = time.perf_counter()
            llm.embed(texts, use_tqdm=False)
            if index >= 0:
                served.append(speed)
                offline.append(len(texts) / (time.perf_counter() - start))
    found: dict[str, Any] = {
        "server_texts_per_s": statistics.median(served),
        "offline_texts_per_s": statistics.median(offline),
        "ratio": statistics.median(served) / statistics.median(offline),
        "pair_ratios": [one / other for one, other in zip(served, offline, strict=True)],
    }
    rows = [
        (f"server, {args.clients} clients", found["server_texts_per_s"]),
        ("offline", found["offline_texts_per_s"]),
        ("ratio", found["ratio"]),
    ]
    show(f"{args.texts} texts of {args.length} tokens", ("", "texts/s"), rows, args.json, found)


if __name__ == "__main__":
    main()
