"""Whether new requests are taken, as one value that others can wait on."""

import asyncio


class ServingFlag:
    """True while a worker group is ready and the engine does not drain."""

    def __init__(self) -> None:
        self._serving = False
        self._changed = asyncio.Event()

    def __bool__(self) -> bool:
        return self._serving

    def set(self, serving: bool) -> None:  # noqa: FBT001 - the value is the whole message
        """Set the value, waking whoever waits for another one."""
        if serving != self._serving:
            self._serving = serving
            self._changed.set()

    async def changed(self) -> bool:
        """Wait until the value was set to another one, and return the newest. One waiter."""
        await self._changed.wait()
        self._changed.clear()
        return self._serving
