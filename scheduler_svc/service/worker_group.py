"""All ranks that hold one copy of the model, as one: who may join, when it is ready, its epochs."""

import asyncio
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import structlog

from pagemill.v1 import worker_pb2
from scheduler_svc.core.block_hash import HashAlgorithm, PoolIdentity
from scheduler_svc.core.hash_algorithms import SHA256
from scheduler_svc.core.kv_groups import KvGroup
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.service.adapter_desk import AdapterDesk
from scheduler_svc.service.group_events import (
    AdapterLost,
    GroupLost,
    GroupReady,
    Mailbox,
    StepArrived,
)
from scheduler_svc.service.places import Places
from scheduler_svc.service.server_state import GroupState
from scheduler_svc.service.worker_link import SentPlan, WorkerLink
from scheduler_svc.service.worker_wire import Epoch

PROTOCOL_VERSION = 1

MAX_BLOCKS = 2**24
"""Most usable blocks of a group: the pool keeps some 100 bytes for each."""


MAX_KV_GROUPS = 64
"""More than any model has: each costs every step a look at every row."""

RETURN_S = 10.0
"""Seconds that a rank is kept for its worker when another rank was lost."""

MAX_PORT = 65535

SAME_HOST = "127.0.0.1"
"""Where ranks that name no host find each other."""


class JoinRefusedError(Exception):
    """A worker may not join. The message names what does not fit, and both values."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(frozen=True, slots=True)
class JoinTerms:
    """What every worker must accept and fit."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    pipeline_depth: int

    num_blocks_override: int = 0
    """Usable blocks to hold. 0: as memory allows."""

    heartbeat_s: float = 1.0
    """Seconds between two heartbeats."""

    vocab_size: int = 0
    """Rows of the embedding, as the scheduler read them. 0: unknown."""

    join_secret: str = ""
    """Empty: none."""

    tensor_parallel_size: int = 1
    """Ranks of a group."""

    max_adapters: int = 0
    """Adapters at once, for which workers keep memory."""


class WorkerGroup:
    """One group, of as many ranks as the terms say.

    It tells the engine, through the mailbox, when it is ready, when it is lost, and what
    each step gave. Workers that return with the boot ids of the pool's owners, and as many
    blocks, still have their cache; if any is another, all of it counts as empty, for a block
    is of use only where every rank has its part.

    A rank loads as soon as it has its place. Once all have loaded they are told to meet; from
    then on the group lives and dies as one.
    """

    number = 0

    def __init__(
        self,
        terms: JoinTerms,
        mailbox: Mailbox,
        *,
        incarnation: int,
        hash_algorithm: HashAlgorithm = SHA256,
        hash_seed: str = "",
        adapters: AdapterDesk | None = None,
    ) -> None:
        self._terms = terms
        self._mailbox = mailbox
        self._incarnation = incarnation
        self._hash_algorithm = hash_algorithm
        self._hash_seed = hash_seed
        self._adapters = adapters or AdapterDesk(0)
        self._epoch_number = 0
        self._places = Places(terms.tensor_parallel_size)
        self._links: dict[int, WorkerLink] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._rendezvous_ports: dict[int, int] = {}
        """Of the ranks that have loaded; only rank 0's means anything."""
        self._have_met = False
        self._ready: dict[int, worker_pb2.WorkerReady] = {}
        self._leader: WorkerLink | None = None
        """Rank 0, while the group is ready."""
        self._model: worker_pb2.ModelFacts | None = None
        """What the first ready group loaded; all later ones must load the same."""
        self._pool_owners: tuple[list[int], int] | None = None
        """Boot ids by rank and number of blocks of the workers whose cache the pool describes."""
        self._stopping = False
        self._log = structlog.get_logger("worker_group")

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return self._terms.tensor_parallel_size

    # For the engine.

    def send(self, plan: StepPlan, traceparent: str) -> SentPlan:
        """Send a plan to the leader. The group must be ready."""
        if self._leader is None:
            raise ValueError("the group got a plan before it was ready")
        return self._leader.send_plan(plan, traceparent)

    def drop_worker(self, reason: str) -> None:
        """End the leader's stream: its result does not fit its plan, or does not come."""
        if self._leader is not None:
            self._leader.fail(grpc.StatusCode.ABORTED, reason)

    def state(self) -> GroupState:
        """Return what is known of the group now."""
        return GroupState(
            number=self.number,
            ready=self._leader is not None,
            epoch=self._epoch_number,
            num_blocks=self._pool_owners[1] if self._pool_owners else 0,
            workers=tuple(self._links[rank].state() for rank in sorted(self._links)),
            fingerprint=self._model.fingerprint if self._model else "",
        )

    # For the server.

    async def stop(self) -> None:
        """Refuse joining, ask the workers to exit, and return when they have left.

        The leader goes first: the others take part in the step it may be in. Waits as long as
        the caller does.
        """
        self._stopping = True
        for link in [self._leader] if self._leader else list(self._links.values()):
            link.send_stop()
        await self._empty.wait()

    # For the servicer.

    def admit(self, hello: worker_pb2.WorkerHello) -> WorkerLink:
        """Give a worker its place.

        Raises: JoinRefusedError. Nothing is changed then.
        """
        if self._stopping:
            raise JoinRefusedError(grpc.StatusCode.UNAVAILABLE, "the scheduler stops")
        self._check_hello(hello)
        wanted = hello.rank if hello.HasField("rank") else None
        rank = self._places.choose(hello.boot_id, wanted, self._now_s())
        if rank is None:
            why = f"group {self.number} {self._places.why_full()}"
            raise JoinRefusedError(grpc.StatusCode.ALREADY_EXISTS, why)
        device_uuid = self._free_device(hello, rank)
        old = self._links.get(rank)
        if old is not None:
            # Its connection broke, and it noticed before we did.
            old.fail(grpc.StatusCode.ABORTED, "the same worker joined again")
        link = WorkerLink(hello, self._ack(hello, rank, device_uuid), self)
        self._places.take(rank, hello.boot_id)
        self._links[rank] = link
        self._empty.clear()
        self._log.info("worker joined", rank=rank, boot_id=f"{hello.boot_id:016x}")
        return link

    def _free_device(self, hello: worker_pb2.WorkerHello, rank: int) -> str:
        """Return the first of a worker's devices that no other rank has."""
        others = [link for link in self._links.values() if link.rank != rank]
        taken = {link.device_uuid for link in others}
        for device in hello.devices:
            if device.uuid not in taken:
                return device.uuid
        raise JoinRefusedError(
            grpc.StatusCode.ALREADY_EXISTS, "every device of the worker is taken by another rank"
        )

    def _ack(
        self, hello: worker_pb2.WorkerHello, rank: int, device_uuid: str
    ) -> worker_pb2.JoinAck:
        terms = self._terms
        return worker_pb2.JoinAck(
            group=self.number,
            rank=rank,
            world_size=self.world_size,
            device_uuid=device_uuid,
            block_size=terms.block_size,
            max_num_seqs=terms.max_num_seqs,
            max_num_batched_tokens=terms.max_num_batched_tokens,
            max_model_len=terms.max_model_len,
            pipeline_depth=terms.pipeline_depth,
            heartbeat_s=terms.heartbeat_s,
            num_blocks_override=terms.num_blocks_override,
            max_adapters=terms.max_adapters,
        )

    # For the link.

    def rank_loaded(self, link: WorkerLink, rendezvous_port: int) -> None:
        """Tell all ranks where to meet, once the last has loaded."""
        if link.rank == 0 and not 1 <= rendezvous_port <= MAX_PORT:
            link.fail(
                grpc.StatusCode.ABORTED,
                f"rendezvous_port is {rendezvous_port}, must be 1 to {MAX_PORT}",
            )
            return
        self._rendezvous_ports[link.rank] = rendezvous_port
        if len(self._rendezvous_ports) < self.world_size:
            return
        address = f"{self._links[0].host or SAME_HOST}:{self._rendezvous_ports[0]}"
        self._have_met = True
        self._log.info("ranks meet", address=address)
        for each in self._links.values():
            each.send_rendezvous(address)

    def worker_ready(self, link: WorkerLink, ready: worker_pb2.WorkerReady) -> None:
        """Let a rank load the adapters that are loaded; the group can take plans when all can."""
        wanted = self._terms.num_blocks_override
        if not 1 <= ready.num_blocks <= MAX_BLOCKS or wanted not in (0, ready.num_blocks):
            bound = str(wanted) if wanted else f"1 to {MAX_BLOCKS}"
            link.fail(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"num_blocks is {ready.num_blocks}, must be {bound}",
            )
            return
        if self.world_size > 1 and not self._have_met:
            link.fail(grpc.StatusCode.ABORTED, "ready came before the ranks had met")
            return
        self._adapters.join(link, lambda lost: self._count_ready(link, ready, lost))

    def _count_ready(
        self, link: WorkerLink, ready: worker_pb2.WorkerReady, lost: Sequence[AdapterLost]
    ) -> None:
        for adapter in lost:
            self._mailbox.post(adapter)
        self._ready[link.rank] = ready
        if len(self._ready) == self.world_size:
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        leader = self._links[0]
        num_blocks = min(ready.num_blocks for ready in self._ready.values())
        owners = ([self._links[rank].boot_id for rank in range(self.world_size)], num_blocks)
        kept_cache = owners == self._pool_owners
        self._pool_owners = owners
        self._model = self._model or leader.model
        self._epoch_number += 1
        self._leader = leader
        leader.epoch = Epoch(self._incarnation, self._epoch_number)
        pool = PoolIdentity(
            fingerprint=leader.model.fingerprint,
            kv_dtype=leader.model.kv_dtype,
            block_size=self._terms.block_size,
            layout=_layout(leader.model.kv_groups),
        )
        root = self._hash_algorithm.root(self._hash_seed, pool)
        kv_groups = tuple(KvGroup(window=g.sliding_window) for g in leader.model.kv_groups)
        self._mailbox.post(GroupReady(self._epoch_number, num_blocks, root, kept_cache, kv_groups))
        self._log.info(
            "worker group ready",
            epoch=self._epoch_number,
            ranks=self.world_size,
            num_blocks=num_blocks,
            kept_cache=kept_cache,
            load_s=round(max(ready.load_s for ready in self._ready.values()), 3),
        )

    def step_arrived(self, _link: WorkerLink, step: StepArrived) -> None:
        """Pass a result on."""
        self._mailbox.post(step)

    def num_plans_sent(self) -> int:
        """Return how many plans the leader has got on its stream; 0 without a leader."""
        return self._leader.num_plans if self._leader is not None else 0

    def adapter_answered(self, link: WorkerLink, answer: worker_pb2.AdapterAnswer) -> None:
        """Pass an answer on."""
        self._adapters.answer(link, answer)

    def worker_gone(self, link: WorkerLink, reason: str) -> None:
        """Free the place; the group is lost with any of its ranks."""
        self._adapters.leave(link)
        del self._links[link.rank]
        self._places.leave(link.rank)
        self._rendezvous_ports.pop(link.rank, None)
        self._ready.pop(link.rank, None)
        if not self._links:
            self._empty.set()
        log = self._log.info if self._stopping else self._log.warning
        log("worker gone", rank=link.rank, boot_id=f"{link.boot_id:016x}", reason=reason)
        if self._leader is not None:
            self._leader = None
            self._mailbox.post(GroupLost(reason))
        if self._have_met:
            self._have_met = False
            self._part(f"rank {link.rank} was lost: {reason}")

    def _part(self, reason: str) -> None:
        """Have the ranks that are left join again, each at its own place; or leave, at the end."""
        for link in list(self._links.values()):
            if self._stopping:
                link.send_stop()
                continue
            self._places.keep(link.rank, link.boot_id, self._now_s() + RETURN_S)
            link.fail(grpc.StatusCode.ABORTED, f"{reason}; join again")

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    # Who may join.

    def _check_hello(self, hello: worker_pb2.WorkerHello) -> None:
        terms, model = self._terms, hello.model
        _require_equal("protocol_version", hello.protocol_version, PROTOCOL_VERSION)
        secret = hello.join_secret.encode()
        if not hmac.compare_digest(secret, terms.join_secret.encode()):
            raise JoinRefusedError(grpc.StatusCode.UNAUTHENTICATED, "join_secret does not match")
        if hello.HasField("group"):
            _require_equal("group", hello.group, self.number)
        if hello.HasField("rank"):
            last = self.world_size - 1
            _require("rank", hello.rank, hello.rank <= last, f"0 to {last}" if last else "0")
        _require("devices", len(hello.devices), len(hello.devices) >= 1, "at least 1")
        if terms.vocab_size:
            _require_equal("vocab_size", model.vocab_size, terms.vocab_size)
        num_kv_groups = len(model.kv_groups)
        _require(
            "the number of kv_groups",
            num_kv_groups,
            1 <= num_kv_groups <= MAX_KV_GROUPS,
            f"1 to {MAX_KV_GROUPS}",
        )
        _require(
            "max_position_embeddings",
            model.max_position_embeddings,
            model.max_position_embeddings >= terms.max_model_len,
            f"at least max_model_len, {terms.max_model_len}",
        )
        if (known := self._known_model()) is not None:
            for field in worker_pb2.ModelFacts.DESCRIPTOR.fields:
                mine, wanted = getattr(model, field.name), getattr(known, field.name)
                _require_equal(field.name, mine, wanted)

    def _known_model(self) -> worker_pb2.ModelFacts | None:
        """Return what a worker must load: what others loaded, or are loading for the same group."""
        if self._model is None and self.world_size > 1:
            return next((link.model for link in self._links.values()), None)
        return self._model


def _require_equal(field: str, value: object, wanted: object) -> None:
    _require(field, value, value == wanted, str(wanted))


def _require(field: str, value: object, fits: bool, bound: str) -> None:  # noqa: FBT001 - a claim
    if not fits:
        text = " ".join(f"{field} is {value}, must be {bound}".split())
        raise JoinRefusedError(grpc.StatusCode.FAILED_PRECONDITION, text)


def _layout(groups: Sequence[worker_pb2.KvGroup]) -> str:
    """Return how a block's bytes are arranged, as far as block names depend on it."""
    return "/".join(
        f"{g.num_layers}x{g.num_kv_heads}x{g.head_dim}w{g.sliding_window}" for g in groups
    )
