"""The same world in the hands of Hypothesis, which finds the shortest way to break it."""

from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from simulation.player import Player
from simulation.setups import draw_setup
from simulation.world import World

randomness = st.randoms(use_true_random=False)


class SchedulerMachine(RuleBasedStateMachine):
    """Every rule is one event of the world."""

    def __init__(self) -> None:
        super().__init__()
        self.player: Player | None = None

    @initialize(rng=randomness)
    def make(self, rng: Random) -> None:
        self.player = Player(World(draw_setup(rng)))
        self.player.start_epoch(rng)

    def _do(self, event: str, rng: Random) -> None:
        assert self.player is not None
        self.player.events[event](rng)

    @rule(rng=randomness)
    def add(self, rng: Random) -> None:
        self._do("add", rng)

    @rule(rng=randomness, count=st.integers(1, 6))
    def run(self, rng: Random, count: int) -> None:
        for _ in range(count):
            self._do("plan", rng)
            self._do("answer", rng)

    @rule(rng=randomness, event=st.sampled_from(["plan", "execute", "answer"]))
    def move(self, rng: Random, event: str) -> None:
        self._do(event, rng)

    @rule(rng=randomness, event=st.sampled_from(["cancel", "cut", "pin", "unpin", "wait"]))
    def ask(self, rng: Random, event: str) -> None:
        self._do(event, rng)

    @rule(rng=randomness, event=st.sampled_from(["flush", "fail", "garble"]))
    def disturb(self, rng: Random, event: str) -> None:
        self._do(event, rng)

    @rule(rng=randomness, event=st.sampled_from(["lose", "rejoin", "start_epoch"]))
    def reconnect(self, rng: Random, event: str) -> None:
        self._do(event, rng)

    @invariant()
    def everything_agrees(self) -> None:
        if self.player is not None:
            self.player.world.check()

    def teardown(self) -> None:
        if self.player is not None:
            self.player.drain()


SchedulerMachine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestEverySequenceGetsItsTokens = SchedulerMachine.TestCase
