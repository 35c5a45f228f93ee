"""Stored responses as an API worker sees them."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec

from inflight.server.access.keys import Caller
from inflight.server.api_workers.messages import FindResponse, Rpc
from inflight.server.api_workers.worker import RemoteResponses
from inflight.server.openai.responses.store import ResponseContent

ALICE = Caller("alice")


class MainProcess:
    """Answers calls about one response, whose content every answer has a copy of."""

    def __init__(self) -> None:
        self.content = ResponseContent(b"x" * 1000, "v1")
        self.versions: list[str | None] = []  # that the caller has
        self.num_bytes = 0  # sent so far

    async def call(self, request: Any, kind: Any) -> Any:
        assert isinstance(request, FindResponse)
        self.versions.append(request.version)
        await asyncio.sleep(0)
        is_known = request.version == self.content.version
        data = b"" if is_known else self.content.data
        self.num_bytes += len(data)
        reply = msgspec.msgpack.encode(ResponseContent(data, self.content.version))
        return msgspec.msgpack.decode(reply, type=kind)


async def test_readers_share_one_copy_that_is_sent_once() -> None:
    main = MainProcess()
    responses = RemoteResponses(cast(Rpc, main))
    contents = await asyncio.gather(*(responses.content(ALICE, "r") for _ in range(3)))
    contents.append(await responses.content(ALICE, "r"))
    assert contents[0] is not None
    assert len({id(content) for content in contents}) == 1
    assert contents[0].data == main.content.data
    assert (main.versions, main.num_bytes) == ([None, "v1"], 1000)
    main.content = ResponseContent(b"y" * 10, "v2")  # the id is used again
    later = await responses.content(ALICE, "r")
    assert later == main.content
    assert contents[0].data == b"x" * 1000
    contents.clear()
    del later
    await responses.content(ALICE, "r")
    assert main.versions[-1] is None  # nobody read it any more, so it was not kept here


async def test_reader_that_leaves_does_not_cancel_the_fetch_of_others() -> None:
    main = MainProcess()
    responses = RemoteResponses(cast(Rpc, main))
    first, second = (asyncio.create_task(responses.content(ALICE, "r")) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    content = await second
    assert content is not None
    assert content.data == main.content.data
    assert len(main.versions) == 1
