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
from scheduler_svc.service.engine_door import GroupState
from scheduler_svc.service.group_events import (
    AdapterLost,
    GroupLost,
    GroupReady,
    Mailbox,
    StepArrived,
)
from scheduler_svc.service.worker_link import SentPlan, WorkerLink
from scheduler_svc.service.worker_wire import Epoch

PROTOCOL_VERSION = 1

MAX_BLOCKS = 2**24
"""Most usable blocks of a group: the pool keeps some 100 bytes for each."""


MAX_KV_GROUPS = 64
"""More than any model has: each costs every step a look at every row."""


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


class WorkerGroup:
    """One group of one rank, for now.

    It tells the engine, through the mailbox, when it is ready, when it is lost, and what
    each step gave. A worker that returns with the boot id of the pool's owner, and as many
    blocks, still has its cache; any other comes with an empty one.
    """

    number = 0
    world_size = 1

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
        self._links: dict[int, WorkerLink] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._leader: WorkerLink | None = None
        """Rank 0, while the group is ready."""
        self._model: worker_pb2.ModelFacts | None = None
        """What the first ready worker loaded; all later ones must load the same."""
        self._pool_owner: tuple[int, int] | None = None
        """Boot id and number of blocks of the worker whose cache the pool describes."""
        self._stopping = False
        self._log = structlog.get_logger("worker_group")

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
            num_blocks=self._pool_owner[1] if self._pool_owner else 0,
            workers=tuple(self._links[rank].state() for rank in sorted(self._links)),
            fingerprint=self._model.fingerprint if self._model else "",
        )

    # For the server.

    async def stop(self) -> None:
        """Refuse joining, ask the workers to exit, and return when they have left.

        Waits as long as the caller does.
        """
        self._stopping = True
        for link in self._links.values():
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
        old = self._links.get(0)
        if old is not None and old.boot_id != hello.boot_id:
            raise JoinRefusedError(
                grpc.StatusCode.ALREADY_EXISTS,
                f"group {self.number} rank 0 is taken by the worker with boot id "
                f"{old.boot_id:016x}",
            )
        if old is not None:
            # Its connection broke, and it noticed before we did.
            old.fail(grpc.StatusCode.ABORTED, "the same worker joined again")
        link = WorkerLink(hello, self._ack(hello), self)
        self._links[0] = link
        self._empty.clear()
        self._log.info("worker joined", rank=0, boot_id=f"{hello.boot_id:016x}")
        return link

    def _ack(self, hello: worker_pb2.WorkerHello) -> worker_pb2.JoinAck:
        terms = self._terms
        return worker_pb2.JoinAck(
            group=self.number,
            rank=0,
            world_size=self.world_size,
            device_uuid=hello.devices[0].uuid,
            block_size=terms.block_size,
            max_num_seqs=terms.max_num_seqs,
            max_num_batched_tokens=terms.max_num_batched_tokens,
            max_model_len=terms.max_model_len,
            pipeline_depth=terms.pipeline_depth,
            heartbeat_s=terms.heartbeat_s,
            num_blocks_override=terms.num_blocks_override,
        )

    # For the link.

    def worker_ready(self, link: WorkerLink, ready: worker_pb2.WorkerReady) -> None:
        """Let the worker load the adapters that are loaded, and then begin an epoch."""
        wanted = self._terms.num_blocks_override
        if not 1 <= ready.num_blocks <= MAX_BLOCKS or wanted not in (0, ready.num_blocks):
            bound = str(wanted) if wanted else f"1 to {MAX_BLOCKS}"
            link.fail(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"num_blocks is {ready.num_blocks}, must be {bound}",
            )
            return
        self._adapters.join(link, lambda lost: self._begin_epoch(link, ready, lost))

    def _begin_epoch(
        self, link: WorkerLink, ready: worker_pb2.WorkerReady, lost: Sequence[AdapterLost]
    ) -> None:
        """Take plans: with one rank, the group is ready when its worker is."""
        for adapter in lost:
            self._mailbox.post(adapter)
        owner = (link.boot_id, ready.num_blocks)
        kept_cache = owner == self._pool_owner
        self._pool_owner = owner
        self._model = self._model or link.model
        self._epoch_number += 1
        self._leader = link
        link.epoch = Epoch(self._incarnation, self._epoch_number)
        pool = PoolIdentity(
            fingerprint=link.model.fingerprint,
            kv_dtype=link.model.kv_dtype,
            block_size=self._terms.block_size,
            layout=_layout(link.model.kv_groups),
        )
        root = self._hash_algorithm.root(self._hash_seed, pool)
        kv_groups = tuple(KvGroup(window=g.sliding_window) for g in link.model.kv_groups)
        self._mailbox.post(
            GroupReady(self._epoch_number, ready.num_blocks, root, kept_cache, kv_groups)
        )
        self._log.info(
            "worker group ready",
            epoch=self._epoch_number,
            num_blocks=ready.num_blocks,
            kept_cache=kept_cache,
            load_s=round(ready.load_s, 3),
        )

    def step_arrived(self, _link: WorkerLink, step: StepArrived) -> None:
        """Pass a result on."""
        self._mailbox.post(step)

    def adapter_answered(self, link: WorkerLink, answer: worker_pb2.AdapterAnswer) -> None:
        """Pass an answer on."""
        self._adapters.answer(link, answer)

    def worker_gone(self, link: WorkerLink, reason: str) -> None:
        """Free the place; the group is lost with any of its ranks."""
        self._adapters.leave(link)
        del self._links[link.rank]
        if not self._links:
            self._empty.set()
        if self._leader is link:
            self._leader = None
            self._mailbox.post(GroupLost(reason))
        log = self._log.info if self._stopping else self._log.warning
        log("worker gone", rank=link.rank, boot_id=f"{link.boot_id:016x}", reason=reason)

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
            _require_equal("rank", hello.rank, 0)
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
        if self._model is not None:
            for field in worker_pb2.ModelFacts.DESCRIPTOR.fields:
                mine, wanted = getattr(model, field.name), getattr(self._model, field.name)
                _require_equal(field.name, mine, wanted)


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
