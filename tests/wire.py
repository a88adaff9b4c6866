"""A TCP proxy between a client and a server, to read along and to cut connections."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Wire:
    """Remembers every byte, in both directions."""

    def __init__(self) -> None:
        self.bytes = bytearray()
        self._ends: set[asyncio.StreamWriter] = set()

    @contextlib.asynccontextmanager
    async def to(self, endpoint: str) -> AsyncIterator[str]:
        """An endpoint that leads to this one."""
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        server.close()
        self.cut()

    def cut(self) -> None:
        """Every connection, at both ends, whatever is on its way."""
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
