"""The RPCs of pagemill.v1.Admin. Those it lacks are not served yet."""

from pagemill.v1.admin_pb2 import (
    DrainRequest,
    DrainResponse,
    FlushCacheRequest,
    FlushCacheResponse,
)
from scheduler_svc.service.engine_door import EngineDoor
from scheduler_svc.service.rpc_handlers import Context


class AdminServicer:
    """Changing what the server does. Methods raise RequestError."""

    def __init__(self, door: EngineDoor) -> None:
        self._door = door

    async def Drain(self, request: DrainRequest, _context: Context) -> DrainResponse:
        """Refuse new requests and wait for the live ones, as long as the call lasts; or resume."""
        if request.resume:
            self._door.resume()
        else:
            await self._door.drain()
        return DrainResponse()

    async def FlushCache(
        self, _request: FlushCacheRequest, _context: Context
    ) -> FlushCacheResponse:
        """Forget every cached prefix."""
        return FlushCacheResponse(num_blocks=self._door.flush_cache())
