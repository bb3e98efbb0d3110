"""A server in a process of its own that tells how long its event loop was held: `python -m` this.

It prints its port, and for each line of standard input how long its loop was held at most since the
last line, in milliseconds: how late a clock of the loop came, or what the process computed in this
time where that is less. So a machine on which others compute counts as little as possible.
"""

from __future__ import annotations

import asyncio
import sys
import time

from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving

TICK_S = 0.001


class Clock:
    """Comes every millisecond, if the loop lets it."""

    def __init__(self):
        self.worst = 0.0

    async def run(self):
        last, spent = time.perf_counter(), time.process_time()
        while True:
            await asyncio.sleep(TICK_S)
            now, now_spent = time.perf_counter(), time.process_time()
            self.worst = max(self.worst, min(now - last - TICK_S, now_spent - spent))
            last, spent = now, now_spent


def main():
    from tilewise.server.embeddings import embeddings_router
    from tilewise.server.messages import messages_router
    from tilewise.server.responses import responses_router
    from tilewise.server.routes import admin_router

    made = (admin_router, embeddings_router, messages_router, responses_router)
    engine = FakeEngine()
    with serving(engine, tools="hermes", routers=lambda s: [r(s) for r in made]) as running:
        clock = Clock()
        asyncio.run_coroutine_threadsafe(clock.run(), running.event_loop)
        print(running.port, flush=True)
        for _ in sys.stdin:
            print(1e3 * clock.worst, flush=True)
            clock.worst = 0.0


if __name__ == "__main__":
    main()
