"""The services that clients call, put on a server."""

from grpc import aio

from pagemill.v1 import admin_pb2, control_pb2, inference_pb2
from scheduler_svc.service.admin_servicer import AdminServicer
from scheduler_svc.service.control_servicer import ControlServicer
from scheduler_svc.service.engine_door import EngineDoor
from scheduler_svc.service.front_end import FrontEnd
from scheduler_svc.service.inference_servicer import InferenceServicer
from scheduler_svc.service.kv_event_feed import KvEventFeed
from scheduler_svc.service.rpc_handlers import add_servicer

__all__ = ["PUBLIC_SERVICES", "FrontEnd", "add_public_services"]

PUBLIC_SERVICES = ("pagemill.v1.Inference", "pagemill.v1.Control", "pagemill.v1.Admin")
"""Full names, for health and reflection."""


def add_public_services(
    server: aio.Server, door: EngineDoor, front: FrontEnd, feed: KvEventFeed | None = None
) -> None:
    """Add Inference, Control and Admin to a server that has not started.

    Whoever builds the server chooses listeners, message limits and interceptors, and adds
    health and reflection. Without `feed` KV events are off.
    """
    add_servicer(
        server,
        inference_pb2.DESCRIPTOR.services_by_name["Inference"],
        InferenceServicer(door, front),
    )
    add_servicer(
        server,
        control_pb2.DESCRIPTOR.services_by_name["Control"],
        ControlServicer(door, front, feed),
    )
    add_servicer(server, admin_pb2.DESCRIPTOR.services_by_name["Admin"], AdminServicer(door, front))
