"""What the worker does at this moment, for whoever asks from another thread."""

from collections import deque
from enum import Enum
from typing import NamedTuple

from pagemill.v1 import worker_pb2

RECENT_STEPS = 16
"""Steps whose mean time predicts the next one's: a second or less of decoding."""


class Phase(Enum):
    """What a worker does. The values are those of the wire."""

    LOADING = worker_pb2.WORKER_PHASE_LOADING
    SIZING = worker_pb2.WORKER_PHASE_SIZING
    IDLE = worker_pb2.WORKER_PHASE_IDLE
    RUNNING = worker_pb2.WORKER_PHASE_RUNNING
    STOPPING = worker_pb2.WORKER_PHASE_STOPPING


class _Moment(NamedTuple):
    phase: Phase
    step_id: int
    expected_end_ns: int


class WorkerStatus:
    """The phase, the last step begun, and when it should end.

    One thread writes. Any may read, without a lock: what they read is one tuple, replaced as a
    whole.
    """

    __slots__ = ("_durations_ns", "_moment")

    def __init__(self) -> None:
        self._durations_ns: deque[int] = deque(maxlen=RECENT_STEPS)
        self._moment = _Moment(Phase.LOADING, step_id=0, expected_end_ns=0)

    @property
    def phase(self) -> Phase:
        """What the worker does."""
        return self._moment.phase

    def enter(self, phase: Phase) -> None:
        """Be in another phase than running."""
        self._moment = _Moment(phase, self._moment.step_id, expected_end_ns=0)

    def begin_step(self, step_id: int, now_ns: int) -> None:
        """Be in a step that should take as long as recent ones did."""
        durations = self._durations_ns
        expected_end_ns = now_ns + sum(durations) // len(durations) if durations else 0
        self._moment = _Moment(Phase.RUNNING, step_id, expected_end_ns)

    def end_step(self, duration_ns: int) -> None:
        """Be idle after a step."""
        self._durations_ns.append(duration_ns)
        self.enter(Phase.IDLE)

    def heartbeat(self, now_ns: int) -> worker_pb2.Heartbeat:
        """Return the moment as a message. A step that is overdue ends within a nanosecond."""
        moment = self._moment
        remaining_ns = max(moment.expected_end_ns - now_ns, 1) if moment.expected_end_ns else 0
        return worker_pb2.Heartbeat(
            phase=moment.phase.value, step_id=moment.step_id, expected_end_ns=remaining_ns
        )
