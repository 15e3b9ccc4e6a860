"""Telling everyone of a step, so that nobody who fails at noting it can end the loop."""

from collections.abc import Iterable

import structlog

from scheduler_svc.service.step_record import StepObserver, StepRecord


class StepObservers:
    """Those who are told of each step. One that raises is told of no further one."""

    def __init__(self, observers: Iterable[StepObserver]) -> None:
        self._observers = tuple(observers)
        self._log = structlog.get_logger("observers")

    def step(self, record: StepRecord) -> None:
        """Tell all of a step."""
        for observer in self._observers:
            try:
                observer.step(record)
            except Exception as error:  # noqa: BLE001 requests matter more than numbers about them
                self._observers = tuple(each for each in self._observers if each is not observer)
                name = type(observer).__name__
                self._log.error("observer failed, and is told no more", name=name, exc_info=error)
