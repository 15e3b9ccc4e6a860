"""What happens next in a world, drawn from random numbers."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random

from scheduler_svc.core.request import Request
from simulation.garbled import garbled
from simulation.load import draw_job
from simulation.setups import draw_num_blocks
from simulation.world import MODELS, World


class Player:
    """Does one event at a time to a world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.num_jobs = 0
        self.events: Mapping[str, Callable[[Random], object]] = {
            "add": self.add,
            "plan": self.plan,
            "execute": self.execute,
            "answer": self.answer,
            "cancel": self.cancel,
            "cut": self.cut,
            "pin": self.pin,
            "unpin": self.unpin,
            "flush": self.flush,
            "fail": self.fail,
            "garble": self.garble,
            "lose": self.lose,
            "rejoin": self.rejoin,
            "start_epoch": self.start_epoch,
            "wait": self.wait,
        }

    def add(self, rng: Random) -> None:
        world = self.world
        job = draw_job(rng, str(self.num_jobs), world.setup.limits, world.heard)
        if world.families:
            other, kinship = rng.choice(world.families).job, rng.random()
            if kinship < 0.02:
                job = other
            elif kinship < 0.3:
                job = replace(job, prompt=other.prompt, audience=other.audience)
        self.num_jobs += 1
        world.add(job)

    def plan(self, rng: Random) -> None:
        del rng
        self.world.plan()

    def execute(self, rng: Random) -> None:
        del rng
        self.world.execute()

    def answer(self, rng: Random) -> None:
        del rng
        self.world.answer()

    def cancel(self, rng: Random) -> None:
        if not self.world.families:
            return
        if rng.random() < 0.5:
            self.world.cancel_family(rng.choice(self.world.families))
        else:
            self.world.cancel(self._member(rng))

    def cut(self, rng: Random) -> None:
        """Find a stop string in what a sequence has said."""
        if not self.world.families:
            return
        family = rng.choice(self.world.families)
        spoken = [each for each in family.witnesses if each.is_live and each.output]
        if spoken:
            witness = rng.choice(spoken)
            self.world.cut(witness.member, rng.randint(0, len(witness.output)))

    def pin(self, rng: Random) -> None:
        if self.world.families:
            job = rng.choice(self.world.families).job
            count = rng.randint(0, len(job.prompt))
            self.world.pin(job.prompt[:count], job, rng.choice((1, 20, 500)))

    def unpin(self, rng: Random) -> None:
        self.world.unpin(rng.choice([*sorted(self.world.pins), 0]))

    def flush(self, rng: Random) -> None:
        del rng
        self.world.flush()

    def fail(self, rng: Random) -> None:
        """Let the worker fail to compute a row, or all."""
        rows = range(self.world.setup.limits.max_num_seqs)
        self.world.execute(frozenset(rows if rng.random() < 0.1 else (rng.choice(rows),)))

    def garble(self, rng: Random) -> None:
        world = self.world
        if not world.wire:
            if world.last_result is not None:
                world.refuse(world.last_result)
            return
        if world.wire[0].result is None:
            world.execute()
        result = world.wire[0].result
        assert result is not None
        world.refuse(rng.choice([*garbled(result, world.last_result)]))

    def lose(self, rng: Random) -> None:
        if self.world.is_connected:
            self.world.lose(rng.randint(0, 2))

    def rejoin(self, rng: Random) -> None:
        """Let the worker return, sometimes before anyone saw that it was lost."""
        if self.world.scheduler.pool is not None and (
            not self.world.is_connected or rng.random() < 0.1
        ):
            self.world.rejoin()

    def start_epoch(self, rng: Random) -> None:
        """Let another worker come in its place, sometimes with another pool or model."""
        world = self.world
        if world.is_connected and rng.random() < 0.9:
            return
        num_blocks, model = world.num_blocks or world.setup.num_blocks, world.model
        if rng.random() < 0.3:
            num_blocks = draw_num_blocks(rng, world.setup.limits, len(world.setup.groups))
        if rng.random() < 0.3:
            model = rng.choice(MODELS)
        world.start_epoch(num_blocks, model)

    def wait(self, rng: Random) -> None:
        self.world.now_ns += rng.choice((1, 10, 100))

    def drain(self) -> None:
        """End the world: its worker is there, and nobody else comes."""
        world = self.world
        if not world.is_connected:
            world.start_epoch(world.num_blocks or world.setup.num_blocks, world.model)
        world.drain()

    def _member(self, rng: Random) -> Request:
        family = rng.choice(self.world.families)
        return rng.choice([each.member for each in family.witnesses if each.is_live])
