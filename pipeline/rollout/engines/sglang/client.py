"""HTTP client of SGLang's server: one thread holds all connections, and finished requests wait in a queue."""

import asyncio
import json
import queue
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import aiohttp


class Client:
    """A client with a thread of its own.

    Args:
        url: address of the server.
        key: key of the server.
    """

    def __init__(self, url: str, key: str) -> None:
        self.finished: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        """(Id, answer or exception) of each finished request of `generate`."""
        self._url, self._headers = url, {"Authorization": f"Bearer {key}"}
        self._loop = asyncio.new_event_loop()
        self._session: aiohttp.ClientSession | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang-client", daemon=True)
        self._thread.start()

    def generate(self, request_id: str, body: Mapping[str, Any]) -> None:
        """Begin a request of `/generate`."""

        def put(future: Future) -> None:
            if not future.cancelled():
                self.finished.put((request_id, future.exception() or future.result()))

        self.begin("/generate", body).add_done_callback(put)

    def begin(self, path: str, body: Mapping[str, Any], timeout: float | None = None) -> Future:
        """Begin a request; returns a future of the answer."""
        return asyncio.run_coroutine_threadsafe(self._post(path, body, timeout), self._loop)

    def post(self, path: str, body: Mapping[str, Any], timeout: float) -> Any:
        """Send a request, and return the answer.

        Raises:
            TimeoutError: the server did not answer in time.
            ValueError: the server refused the request; the text has its reason.
            OSError: the server cannot be reached.
        """
        return self.begin(path, body, timeout).result()

    def close(self) -> None:
        """Drop all requests, and end the thread."""

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            if self._session is not None:
                await self._session.close()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _post(self, path: str, body: Mapping[str, Any], timeout: float | None) -> Any:
        if self._session is None:
            # The server closes a connection that was idle for some seconds, maybe while the next request is sent on it.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(self._url, headers=self._headers, connector=connector)
        own = aiohttp.ClientTimeout(total=timeout)
        async with self._session.post(path, json=body, timeout=own) as answer:
            text = await answer.text()
            if answer.status >= 400:
                raise ValueError(f"SGLang answers {path} with HTTP {answer.status}: {text[:400]}")
            return json.loads(text) if answer.content_type == "application/json" else text
