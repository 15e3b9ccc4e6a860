"""The first exchange of a stream: who the worker is, and the place it gets."""

import math
from dataclasses import dataclass
from typing import Final

from pagemill.v1 import worker_pb2
from worker_svc.errors import InvariantError
from worker_svc.model.shard import Shard
from worker_svc.service.model_host import CacheLimits, ModelHost

PROTOCOL_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the scheduler asks of a worker it takes."""

    group: int

    shard: Shard
    """Which rank of how many, and so which part of the model."""

    device_uuid: str
    """Of the hello's devices, the one to use."""

    limits: CacheLimits

    heartbeat_s: float
    """Seconds between two heartbeats."""


def make_hello(
    host: ModelHost, boot_id: int, join_secret: str, rank_host: str, rank: int | None
) -> worker_pb2.WorkerHello:
    """Return the first message of a stream. `rank`: the one whose part of the model is loaded."""
    devices = []
    for each in host.devices:
        device = worker_pb2.Device()
        device.CopyFrom(each)
        device.uuid = device.uuid or f"{boot_id:016x}"
        devices.append(device)
    return worker_pb2.WorkerHello(
        protocol_version=PROTOCOL_VERSION,
        boot_id=boot_id,
        devices=devices,
        model=host.model,
        join_secret=join_secret,
        host=rank_host,
        rank=rank,
    )


def read_assignment(ack: worker_pb2.JoinAck, hello: worker_pb2.WorkerHello) -> Assignment:
    """Return what an acknowledgement asks for.

    Raises: InvariantError if it is a place that this worker cannot take.
    """
    if ack.rank >= ack.world_size:
        raise InvariantError(
            f"rank {ack.rank} is assigned, must be below world_size {ack.world_size}"
        )
    if ack.device_uuid not in {device.uuid for device in hello.devices}:
        raise InvariantError(f"device {ack.device_uuid!r} is assigned, which is not this worker's")
    for field in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        if getattr(ack, field) < 1:
            raise InvariantError(f"{field} is {getattr(ack, field)}, must be at least 1")
    if ack.pipeline_depth < 1:
        raise InvariantError(f"pipeline_depth is {ack.pipeline_depth}, must be at least 1")
    if not (math.isfinite(ack.heartbeat_s) and ack.heartbeat_s > 0):
        raise InvariantError(f"heartbeat_s is {ack.heartbeat_s}, must be above 0")
    return Assignment(
        group=ack.group,
        shard=Shard(ack.rank, ack.world_size),
        device_uuid=ack.device_uuid,
        limits=CacheLimits(
            block_size=ack.block_size,
            max_num_seqs=ack.max_num_seqs,
            max_num_batched_tokens=ack.max_num_batched_tokens,
            max_model_len=ack.max_model_len,
            num_blocks_override=ack.num_blocks_override,
            max_adapters=ack.max_adapters,
        ),
        heartbeat_s=ack.heartbeat_s,
    )
