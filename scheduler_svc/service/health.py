"""Keeps grpc.health.v1 in step with whether the engine takes requests."""

from collections.abc import Sequence

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from scheduler_svc.service.serving_flag import ServingFlag

WHOLE_SERVER = ""
HEALTH_SERVICE: str = health.SERVICE_NAME


class Health:
    """The health of the whole server and of each service: all are the engine's."""

    def __init__(self, server: aio.Server, services: Sequence[str]) -> None:
        self._names = (WHOLE_SERVER, *services)
        self._servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def follow(self, serving: ServingFlag) -> None:
        """Answer as the flag says, until cancelled."""
        is_serving = bool(serving)
        while True:
            status = health_pb2.HealthCheckResponse.NOT_SERVING
            if is_serving:
                status = health_pb2.HealthCheckResponse.SERVING
            for name in self._names:
                await self._servicer.set(name, status)
            is_serving = await serving.changed()
