"""A TCP proxy between a client and a server that records bytes and cuts connections."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

# The pauses between two cuts are up to this long.
PAUSE_S = 0.1


class TcpProxy:
    """Records every byte in both directions."""

    def __init__(self) -> None:
        self.bytes = bytearray()
        self._ends: set[asyncio.StreamWriter] = set()

    @contextlib.asynccontextmanager
    async def open(self, endpoint: str) -> AsyncIterator[str]:
        """Listen, and yield an endpoint that leads to `endpoint`."""
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        server.close()
        self.cut()

    def cut(self) -> None:
        """Abort every connection at both ends, with the data on its way."""
        for writer in self._ends:
            writer.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._ends.add(writer)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                self.bytes += data
                writer.write(data)
                await writer.drain()
        self._ends.discard(writer)
        writer.close()


@contextlib.asynccontextmanager
async def cut_connections(url: str, seed: int) -> AsyncIterator[str]:
    """Yield the URL of a proxy of a server, whose connections are cut several times a second."""
    proxy, chance = TcpProxy(), random.Random(seed)

    async def cut() -> None:
        while True:
            await asyncio.sleep(chance.random() * PAUSE_S)
            proxy.cut()

    async with proxy.open(f"tcp://{urlsplit(url).netloc}") as endpoint:
        cutting = asyncio.create_task(cut())
        yield endpoint.replace("tcp", "http")
        cutting.cancel()
