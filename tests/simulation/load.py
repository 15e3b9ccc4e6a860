"""What clients ask for, drawn from random numbers."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from scheduler_svc.core.beam_options import BeamOptions, EarlyStopping
from scheduler_svc.core.block_hash import Adapter, ExtraKeys
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.request import Request, Sampling, Stopping

AUDIENCES = (
    ExtraKeys(),
    ExtraKeys(b"pepper"),
    ExtraKeys(b"pepper", b"domain"),
    ExtraKeys(adapter=Adapter("pepper", 1)),
    ExtraKeys(adapter=Adapter("pepper", 2)),
    ExtraKeys(b"1", adapter=Adapter("pepper", 1)),
)
"""Who may share prefixes with whom, and whose keys and values differ."""


@dataclass(frozen=True)
class Job:
    """One request, as its client sees it."""

    name: str
    prompt: tuple[int, ...]
    max_output: int | None
    n: int = 1
    beam: BeamOptions | None = None
    eos: frozenset[int] = frozenset()
    stops: frozenset[int] = frozenset()
    min_output: int = 0
    audience: int = 0
    """Place in AUDIENCES."""
    read_cache: bool = True
    priority: int = 0
    tenant: str = ""
    lifetime_ns: int | None = None

    @property
    def extra(self) -> ExtraKeys:
        return AUDIENCES[self.audience]

    @property
    def root(self) -> int:
        """History before the prompt: nobody of another audience can have the same."""
        return hash((17, self.audience))

    @property
    def width(self) -> int:
        """Rows that it takes."""
        return self.beam.width if self.beam else self.n

    @property
    def stopping(self) -> Stopping:
        return Stopping(self.max_output, self.eos, self.stops, self.min_output)

    def request(self, now_ns: int) -> Request:
        return Request(
            self.name,
            array("i", self.prompt),
            Sampling(0.0),
            self.stopping,
            extra=self.extra,
            read_cache=self.read_cache,
            priority=self.priority,
            tenant=self.tenant,
            weight=1.0 + (self.tenant == "b"),
            deadline_ns=None if self.lifetime_ns is None else now_ns + self.lifetime_ns,
            num_sequences=self.n,
            beam=self.beam,
        )

    def num_blocks(self, block_size: int, width: int) -> int:
        """Return the blocks that `width` sequences hold at their ends: a shared prompt, and own."""
        first = self.max_output or 1
        whole = -(-(len(self.prompt) + first - 1) // block_size)
        shared = len(self.prompt) // block_size
        return whole if first == 1 else shared + width * (whole - shared)


def draw_job(rng: Random, name: str, limits: Limits, heard: Sequence[Sequence[int]]) -> Job:
    """Draw a request. Some go on from a text that was `heard` before, some are hopeless."""
    length = rng.choice((1, 2, 3, 5, 8, 14, limits.max_model_len // 2))
    prompt = tuple(rng.choices((0, 1), k=rng.randint(1, length)))
    if heard and rng.random() < 0.5:
        text = rng.choice(heard)
        prompt = (*text[: rng.randint(1, len(text))], *prompt[: rng.randint(0, 3)])
    stops = rng.random() < 0.5
    job = Job(
        name,
        prompt,
        rng.choice((1, 2, 3, 5, 8, 12, limits.max_model_len // 2)),
        n=rng.choice((1, 1, 2, 3, 4)),
        eos=frozenset({2}) if stops and rng.random() < 0.5 else frozenset(),
        stops=frozenset({2}) if stops else frozenset(),
        min_output=rng.choice((0, 0, 0, 2, 4)) if stops else 0,
        audience=rng.choice((0, 0, 0, *range(len(AUDIENCES)))),
        read_cache=rng.random() < 0.9,
        priority=rng.choice((-1, 0, 0, 0, 1)),
        tenant=rng.choice("ab"),
        lifetime_ns=rng.randint(1, 200) if rng.random() < 0.1 else None,
    )
    if rng.random() < 0.12:
        job = replace(job, n=1, beam=_draw_beam(rng))
    oddity = rng.random()
    if oddity < 0.03 and job.beam is None:
        return replace(job, max_output=None)
    if oddity < 0.05:
        return replace(job, n=limits.max_num_seqs + rng.randint(-1, 1))
    if oddity < 0.07:
        return replace(job, prompt=(0,) * (limits.max_model_len + rng.randint(-2, 1)))
    if oddity < 0.09:
        longest = limits.max_model_len - len(prompt)
        return replace(job, max_output=max(1, longest + rng.randint(-1, 1)))
    return job


def _draw_beam(rng: Random) -> BeamOptions:
    width = rng.randint(1, 4)
    return BeamOptions(
        width,
        length_penalty=rng.choice((0.0, 1.0, -1.0)),
        early_stopping=rng.choice(tuple(EarlyStopping)),
        num_returned=rng.randint(1, width),
    )
