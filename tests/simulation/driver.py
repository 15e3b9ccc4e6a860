"""One simulated world, driven by one number: a seed and a count of steps replay it exactly."""

from dataclasses import dataclass
from random import Random

from simulation.player import Player
from simulation.setups import draw_setup
from simulation.world import World

RATES = {
    "add": (6, 12, 25),
    "plan": (40,),
    "execute": (0, 20),
    "answer": (20, 40),
    "cancel": (0, 0, 1, 4),
    "cut": (0, 1, 3),
    "pin": (0, 2, 6),
    "unpin": (0, 1),
    "flush": (0, 0, 0.2, 1),
    "fail": (0, 0, 0.5, 2),
    "garble": (0.3, 1),
    "lose": (0, 0.2, 1),
    "rejoin": (1, 3),
    "start_epoch": (1, 3),
    "wait": (0, 1),
}
"""How often each event happens, relative to the others. Each world draws one rate of each."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What happened in a world. Steps are plans."""

    seed: int
    num_steps: int
    num_events: int
    num_jobs: int
    num_tokens: int
    num_preemptions: int
    num_copies: int
    digest: int


def simulate(seed: int, num_steps: int, check_every: int = 1) -> Summary:
    """Run a world for so many steps, then to the end of all requests in it.

    Raises: AssertionError or InvariantError at the first thing that is not as it must be.
    """
    rng = Random(seed)
    world = World(draw_setup(rng), check_every)
    player = Player(world)
    names = list(RATES)
    weights = [rng.choice(RATES[name]) for name in names]
    events = [player.events[name] for name in names]
    num_events = 0
    while world.num_steps < num_steps:
        for event in rng.choices(events, weights, k=64):
            event(rng)
        num_events += 64
        if not world.families:
            player.add(rng)
    player.drain()
    counters = world.scheduler.counters
    return Summary(
        seed,
        world.num_steps,
        num_events,
        player.num_jobs,
        counters.generation_tokens,
        counters.preemptions,
        world.num_copies,
        world.digest,
    )
