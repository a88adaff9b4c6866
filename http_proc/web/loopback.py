"""LoopbackServer: let the gateway send requests to handlers of its own.

The handlers need an aiohttp request, which aiohttp's own server makes. It listens on a Unix socket
in a directory that only the server's user can enter: without TLS, API keys and the limit of
connections, which are for clients.
"""

import tempfile
from pathlib import Path

import aiohttp
from aiohttp import web

_NO_TIMEOUT = aiohttp.ClientTimeout(total=None)


class LoopbackServer:
    """Serve an application to this process alone.

    Args:
        app: has the handlers.
        run_dir: private directory for sockets; None: one below the directory for temporary files.
        name: of the socket; `http://NAME/path` is the URL of a request.

    Attributes:
        session: the HTTP client of this server, from `start` on.
    """

    session: aiohttp.ClientSession

    def __init__(self, app: web.Application, run_dir: Path | None, name: str) -> None:
        self._app = app
        self._run_dir = run_dir
        self._name = name

    async def start(self) -> None:
        """Listen, and connect."""
        self._directory = tempfile.TemporaryDirectory(prefix=f"{self._name}-", dir=self._run_dir)
        path = str(Path(self._directory.name) / self._name)
        self._runner = web.AppRunner(
            self._app, access_log=None, handler_cancellation=True, handle_signals=False
        )
        await self._runner.setup()
        await web.UnixSite(self._runner, path).start()
        connector = aiohttp.UnixConnector(path, limit=0)
        self.session = aiohttp.ClientSession(connector=connector, timeout=_NO_TIMEOUT)

    async def stop(self) -> None:
        """Disconnect, which ends the requests, and close the socket."""
        await self.session.close()
        await self._runner.cleanup()
        self._directory.cleanup()
