"""An error under /ui as a page: what is wrong, what is accepted, and links to other pages.

The page is rendered from the API's problem document, whether a route, the framework, the body
limit, the check of keys or an internal error produced it. Only problem documents are held back and
rewritten; other responses pass through unbuffered.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import MEDIA_TYPE
from service.pages.render import HEADERS, html


class ErrorPages:
    """Rewrites the problem documents of pages. The outermost middleware, so it sees all of them."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or not scope["path"].startswith("/ui"):
            await self.app(scope, receive, send)
            return
        start: Message | None = None
        body = bytearray()

        async def rewritten(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and _is_problem(message):
                start = message
                return
            if start is None:  # not a problem document
                await send(message)
                return
            body.extend(message.get("body", b""))
            if message.get("more_body", False):
                return
            document = msgspec.json.decode(bytes(body), type=dict[str, Any])
            content = html("error.html", nav="", problem=document).encode()
            headers = MutableHeaders(raw=start["headers"])
            headers.update(HEADERS)
            headers["content-type"] = "text/html; charset=utf-8"
            headers["content-length"] = str(len(content))
            await send(start)
            await send({"type": "http.response.body", "body": content})

        await self.app(scope, receive, rewritten)


def _is_problem(message: Message) -> bool:
    kind = dict(message.get("headers", ())).get(b"content-type", b"")
    return bool(kind == MEDIA_TYPE.encode())
