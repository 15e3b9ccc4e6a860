"""Which plan may come next: the last step's successor, or a reset."""

from worker_svc.errors import InvariantError
from worker_svc.service.wire import Epoch


class PlanOrder:
    """Proves that no plan of a connection is lost, repeated or meant for another epoch.

    A worker's rows are the sum of all plans since the last reset, so that one plan missed would
    be wrong tokens, silently.
    """

    __slots__ = ("_epoch", "_next_step_id")

    def __init__(self) -> None:
        self._epoch: Epoch | None = None
        self._next_step_id = 0

    def check(self, step_id: int, epoch: Epoch, *, reset: bool) -> None:
        """Accept a plan as the next one.

        Raises: InvariantError, naming what came and what was due. Nothing is changed then.
        """
        if reset:
            due = 0
        elif self._epoch is None:
            raise InvariantError(f"step {step_id} is the stream's first, and must be a reset")
        elif epoch != self._epoch:
            raise InvariantError(
                f"step {step_id} is for epoch {epoch.number} of {epoch.incarnation:#x} after "
                f"epoch {self._epoch.number} of {self._epoch.incarnation:#x}, without a reset"
            )
        else:
            due = self._next_step_id
        if step_id != due:
            raise InvariantError(f"step {step_id} came where step {due} was due")
        self._epoch, self._next_step_id = epoch, step_id + 1
