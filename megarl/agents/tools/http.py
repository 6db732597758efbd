"""Pages over HTTP, from hosts that are allowed, with limits of size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Annotated, Any

import httpx

from megarl.agents.function_tool import function_schema
from megarl.agents.protocol import Schema, Task


class HttpGet:
    """A tool that reads a page by GET. allowed_hosts: `host`, or `host:port` for another port than the
    scheme's; nothing else is asked, and redirects are told and not followed, so that no page leads elsewhere.
    max_bytes: that are read of a page; the rest is left out.
    time_limit_s: of the whole.
    """

    def __init__(
        self,
        allowed_hosts: Collection[str],
        *,
        max_bytes: int = 65536,
        time_limit_s: float = 10.0,
        name: str = "http_get",
        description: str = "Reads the page at a URL.",
    ) -> None:
        self._allowed = frozenset(allowed_hosts)
        self._max_bytes = max_bytes
        self._time_limit_s = time_limit_s
        self._schema = function_schema(self._shape, name, description)

    @property
    def schema(self) -> Schema:
        return self._schema

    async def call(self, arguments: Mapping[str, Any], task: Task) -> str:
        url = httpx.URL(arguments["url"])
        host = url.netloc.decode()

        # The host must match exactly, and a URL with credentials is refused.
        if url.scheme not in ("http", "https") or host not in self._allowed or url.userinfo:
            raise ValueError(
                f"{host or arguments['url']!r} is not allowed; there are: {', '.join(sorted(self._allowed))}"
            )

        try:
            return await self._read(url)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise TimeoutError(f"{host} did not answer within {self._time_limit_s:g} s") from error

    async def _read(self, url: httpx.URL) -> str:
        async with asyncio.timeout(self._time_limit_s):
            # Without the environment's proxies and passwords, and without compression: few bytes may become
            # very many.
            client = httpx.AsyncClient(
                trust_env=False, timeout=self._time_limit_s, headers={"Accept-Encoding": "identity"}
            )
            async with client, client.stream("GET", url) as page:
                if page.has_redirect_location:
                    return f"status {page.status_code}, to {page.headers['location']}"
                body = b""
                # What lies beyond the limit is not even read.
                async for part in page.aiter_raw():
                    body += part
                    if len(body) >= self._max_bytes:
                        break

        text = body[: self._max_bytes].decode(page.encoding or "utf-8", errors="replace")
        return text if page.is_success else f"status {page.status_code}\n{text}"

    @staticmethod
    def _shape(url: Annotated[str, "http:// or https://"]) -> None:
        """The signature that the model is told of."""
