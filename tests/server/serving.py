"""A server on a port of its own, in a thread, over the fake engine or a real one."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

from tests.server.fake_engine import STORY, FakeEngine
from tilewise.server.app import build_app
from tilewise.server.bridge import Bridge
from tilewise.server.chat import ChatTemplate, read_template
from tilewise.server.chat_format import format_of
from tilewise.server.keys import KeyRing
from tilewise.server.limits import Queue, RequestLimits
from tilewise.server.metrics import Metrics
from tilewise.server.run import Server, ServerOptions, bind
from tilewise.server.service import Service
from tilewise.server.templates import Templates

PATIENCE_S = 60.0  # on a machine whose cores others use; what comes, comes in milliseconds


class Running:
    """A running server.

    Attributes:
        url: without a path.
        engine, bridge, server: what it is made of.
    """

    def __init__(self, engine, loop, bridge, server, sock):
        self.engine, self.bridge, self.server = engine, bridge, server
        self.host, self.port = sock.getsockname()[:2]
        self.url = f"http://127.0.0.1:{self.port}"
        self.event_loop = None
        self._sock = sock
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.error = None

    def _run(self):
        async def main():
            self.event_loop = asyncio.get_running_loop()
            await self.server.serve([self._sock])

        try:
            asyncio.run(main())
        except BaseException as error:
            self.error = error

    def start(self):
        self._thread.start()
        wait_for(lambda: self.server.started or self.error)
        assert self.error is None

    def stop(self):
        if self._thread.is_alive():
            self.event_loop.call_soon_threadsafe(self.server.stop)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def tasks(self):
        """Names of the tasks on the server's event loop that work for requests."""
        found = asyncio.run_coroutine_threadsafe(_tasks(), self.event_loop).result(PATIENCE_S)
        return [name for name in found if "_listen" in name or "run_asgi" in name or "pump" in name]


async def _tasks():
    return [repr(task.get_coro()) for task in asyncio.all_tasks()]


def wait_for(condition, seconds=PATIENCE_S):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


@contextmanager
def serving(
    engine=None,
    *,
    loop=None,
    queue=None,
    keys=None,
    limits=None,
    template=None,
    options=None,
    bridge_options=None,
    routers=None,
    send_buffer=None,
    tools="none",
    reasoning="none",
    **service_options,
):
    """Run a server; what is not given is the fake engine's and has no limits to speak of.

    Args:
        tools, reasoning: names of formats, see `chat_format.format_of`.
    """
    engine = engine or FakeEngine()
    loop = loop or engine
    bridge = Bridge(
        engine,
        loop,
        queue=queue or Queue(),
        limits=limits or RequestLimits(),
        metrics=Metrics("story", engine.stats),
        **(bridge_options or {}),
    )
    source, tokens = read_template(STORY, template)
    form = format_of("", tools, reasoning)
    service = Service(
        bridge,
        ["story", "alias"],
        # Chats of megabytes go to a process and back: on a busy machine in seconds.
        ChatTemplate(source, tokens, renderer=Templates(max_seconds=PATIENCE_S), calls=form.calls),
        keys=KeyRing(keys or {}),
        form=form,
        **service_options,
    )
    app = build_app(service, routers(service) if routers else ())
    sock = bind("127.0.0.1", 0)
    if send_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # connections inherit it
    server = Server(
        app,
        bridge,
        options or replace(ServerOptions(), shutdown_timeout_s=2.0),
        handles_signals=False,
    )
    running = Running(engine, loop, bridge, server, sock)
    running.service = service
    running.start()
    try:
        yield running
    finally:
        running.stop()
