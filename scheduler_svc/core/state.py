"""What the scheduler knows of one worker group: the state that every decision reads and changes."""

from dataclasses import dataclass, field

from scheduler_svc.core.beam_family import BeamFamily
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.counters import Counters
from scheduler_svc.core.journal import Journal
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.pending_fork import PendingFork
from scheduler_svc.core.prefix_cache import PrefixCache
from scheduler_svc.core.request import Request, RequestKey
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.victims import VictimPolicy
from scheduler_svc.core.waiting_queue import WaitingQueue


@dataclass(slots=True, eq=False)
class SchedulerState:
    """Queue, rows, blocks and the steps in flight.

    The modules beside this one are the decisions: each is given the state and changes its part
    of it. `Scheduler` is their only caller from outside.
    """

    limits: Limits
    rows: Rows
    waiting: WaitingQueue
    journal: Journal
    prefixes: PrefixCache
    choose_victim: VictimPolicy
    counters: Counters = field(default_factory=Counters)

    live: dict[RequestKey, Request] = field(default_factory=dict)
    """Requests that have not ended, by tenant and id; of a family the root, while any lives."""

    expired: list[Request] = field(default_factory=list)
    """Requests dropped from the queue for their deadlines, until the shell takes them."""

    families: dict[int, Request] = field(default_factory=dict)
    """Rows that run for a whole family, and their owners: what they sample forks them."""

    beams: dict[Request, BeamFamily] = field(default_factory=dict)
    """Beam searches that have begun, by their roots."""

    pending_forks: dict[int, PendingFork] = field(default_factory=dict)
    """Rows that the next plan forks."""

    shared_tails: set[int] = field(default_factory=set)
    """Rows whose last block is partly filled, and may have more users."""

    pool: BlockPool | None = None
    """None until a worker group has joined."""

    connected: bool = False
    """The group takes plans."""

    reset: bool = True
    """The next plan begins with a reset."""

    next_step_id: int = 0

    pause_debt: int = 0
    """What pauses weigh that no preemption has paid for, in tokens."""

    released_rows: list[int] = field(default_factory=list)
    """Rows given back since the last plan."""
