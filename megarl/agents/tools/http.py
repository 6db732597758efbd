"""Fetches pages over HTTP from allowed hosts, with limits on size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Annotated, Any

import httpx

from megarl.agents.function_tool import function_schema
from megarl.agents.protocol import Task


class HttpGet:
    """A tool that reads a page with GET.

    Redirects are reported but not followed, so no page can lead to another host.

    Args:
        allowed_hosts: `host`, or `host:port` for a port other than the scheme's. All other hosts are refused.
        max_bytes: Bytes read of a page; the rest is dropped.
        time_limit_s: Time limit of the whole request.
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
        self.schema = function_schema(self._shape, name, description)

    async def call(self, arguments: Mapping[str, Any], task: Task) -> str:
        url = httpx.URL(arguments["url"])
        host = url.netloc.decode()

        # The host must match exactly, and a URL with credentials is refused.
        if url.scheme not in ("http", "https") or host not in self._allowed or url.userinfo:
            raise ValueError(
                f"{host or arguments['url']!r} is not allowed; allowed hosts: "
                f"{', '.join(sorted(self._allowed))}"
            )

        try:
            return await self._read(url)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise TimeoutError(f"{host} did not answer within {self._time_limit_s:g} s") from error

    async def _read(self, url: httpx.URL) -> str:
        async with asyncio.timeout(self._time_limit_s):
            # Ignore the environment's proxies and passwords. Disable compression, because a few compressed
            # bytes can expand to very many.
            client = httpx.AsyncClient(
                trust_env=False, timeout=self._time_limit_s, headers={"Accept-Encoding": "identity"}
            )
            async with client, client.stream("GET", url) as page:
                if page.has_redirect_location:
                    return f"status {page.status_code}, to {page.headers['location']}"
                body = b""
                # Bytes beyond the limit are not downloaded.
                async for part in page.aiter_raw():
                    body += part
                    if len(body) >= self._max_bytes:
                        break

        text = body[: self._max_bytes].decode(page.encoding or "utf-8", errors="replace")
        return text if page.is_success else f"status {page.status_code}\n{text}"

    @staticmethod
    def _shape(url: Annotated[str, "http:// or https://"]) -> None:
        """Define the signature shown to the model."""
