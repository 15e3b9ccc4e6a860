"""The RPCs of pagemill.v1.Admin."""

from array import array
from pathlib import PurePosixPath

from pagemill.v1.admin_pb2 import (
    AdapterInfo,
    DrainRequest,
    DrainResponse,
    FlushCacheRequest,
    FlushCacheResponse,
    ListAdaptersRequest,
    ListAdaptersResponse,
    LoadAdapterRequest,
    LoadAdapterResponse,
    PinRequest,
    PinResponse,
    UnloadAdapterRequest,
    UnloadAdapterResponse,
    UnpinRequest,
    UnpinResponse,
)
from scheduler_svc.core.block_hash import ExtraKeys
from scheduler_svc.core.errors import InvalidRequestError
from scheduler_svc.service.engine_door import EngineDoor
from scheduler_svc.service.field_bounds import (
    MAX_ADAPTER_BYTES,
    MAX_SALT_BYTES,
    Interval,
    check_name,
    check_tenant,
    check_token_ids,
    quoted,
)
from scheduler_svc.service.front_end import FrontEnd
from scheduler_svc.service.request_making import cache_domain
from scheduler_svc.service.rpc_handlers import Context

_MAX_PATH_BYTES = 4096
_TIME_TO_LIVE_S = Interval(0, 30 * 86400, above_low=True)


class AdminServicer:
    """Changing what the server does. Methods raise RequestError."""

    def __init__(self, door: EngineDoor, front: FrontEnd) -> None:
        self._door = door
        self._front = front

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

    async def Pin(self, request: PinRequest, _context: Context) -> PinResponse:
        """Keep what is cached of a prefix."""
        front = self._front
        front.model_name(request.model)
        ids, salt = request.token_ids, request.salt.encode()
        if not 1 <= len(ids) <= front.limits.max_model_len:
            raise InvalidRequestError(
                "token_ids",
                f"token_ids has {len(ids)} ids, must have 1 to {front.limits.max_model_len}",
            )
        check_token_ids("token_ids", ids, front.facts.vocab_size)
        _TIME_TO_LIVE_S.check("time_to_live_s", request.time_to_live_s)
        if len(salt) > MAX_SALT_BYTES:
            raise InvalidRequestError(
                "salt", f"salt has {len(salt)} bytes, must have at most {MAX_SALT_BYTES}"
            )
        check_tenant(request.tenant)
        extra = ExtraKeys(salt=salt, cache_domain=cache_domain(request.tenant))
        pin_id, num_blocks = self._door.pin(array("i", ids), extra, request.time_to_live_s)
        return PinResponse(pin_id=pin_id, num_blocks=num_blocks)

    async def Unpin(self, request: UnpinRequest, _context: Context) -> UnpinResponse:
        """Let go of a pinned prefix."""
        self._door.unpin(request.pin_id)
        return UnpinResponse()

    async def LoadAdapter(
        self, request: LoadAdapterRequest, _context: Context
    ) -> LoadAdapterResponse:
        """Load an adapter into every worker; the worker alone knows what lies where."""
        _check_given("name", request.name, MAX_ADAPTER_BYTES)
        _check_given("path", request.path, _MAX_PATH_BYTES)
        if ".." in PurePosixPath(request.path).parts:
            raise InvalidRequestError(
                "path", f"path is {quoted(request.path)}, must lie below the workers' adapter_dir"
            )
        generation = await self._door.adapters.load(request.name, request.path)
        return LoadAdapterResponse(generation=generation)

    async def UnloadAdapter(
        self, request: UnloadAdapterRequest, _context: Context
    ) -> UnloadAdapterResponse:
        """Unload an adapter, and wait for those that use it, as long as the call lasts."""
        _check_given("name", request.name, MAX_ADAPTER_BYTES)
        await self._door.adapters.unload(request.name)
        return UnloadAdapterResponse()

    async def ListAdapters(
        self, _request: ListAdaptersRequest, _context: Context
    ) -> ListAdaptersResponse:
        """Return what requests can name."""
        loaded = self._door.adapters.loaded()
        return ListAdaptersResponse(
            adapters=[AdapterInfo(name=each.name, generation=each.generation) for each in loaded]
        )


def _check_given(field: str, text: str, most_bytes: int) -> None:
    if not text:
        raise InvalidRequestError(field, f"{field} is empty, must have a character")
    check_name(field, text, most_bytes)
