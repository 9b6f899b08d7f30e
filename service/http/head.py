"""HEAD on whatever GET is possible on: the same status and headers, and no body."""

from __future__ import annotations

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class AnswerHead:
    """Asks for a GET, and ends it when its head is there: an event stream would go on for ever.

    What is inside, the log and the metrics too, sees a GET. The server outside knows of the HEAD
    and keeps the Content-Length.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return
        with anyio.CancelScope() as asked:

            async def head_only(message: Message) -> None:
                if message["type"] == "http.response.start":
                    await send(message)
                    await send({"type": "http.response.body", "body": b""})
                    asked.cancel()

            await self.app({**scope, "method": "GET"}, receive, head_only)
