"""Changes of the scheduler that come from outside the engine's loop."""

from collections.abc import Iterator
from contextlib import contextmanager

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.service.group_events import Mailbox


class OutsideChanges:
    """Hands the scheduler out for a change, and wakes the loop behind it."""

    def __init__(self, scheduler: Scheduler, mailbox: Mailbox) -> None:
        self._scheduler = scheduler
        self._mailbox = mailbox

    @contextmanager
    def __call__(self) -> Iterator[Scheduler]:
        """Yield the scheduler.

        A contradiction goes to the loop as well, and with it ends the process: grpc and the
        event loop's timers would only log it.
        """
        try:
            yield self._scheduler
        except InvariantError as error:
            self._mailbox.fail(error)
            raise
        self._mailbox.wake()
