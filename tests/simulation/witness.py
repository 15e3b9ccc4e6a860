"""Who knows what a sequence must say: what it says alone."""

from functools import reduce

from fake_worker import extend, next_token, search_alone
from scheduler_svc.core.beam_options import BeamOptions
from scheduler_svc.core.request import FinishReason, Request
from simulation.load import Job


class Witness:
    """Hears a member's tokens one by one, and proves each."""

    def __init__(self, member: Request, job: Job) -> None:
        self.member = member
        self.job = job
        self.output: list[int] = []
        self._history = reduce(extend, job.prompt, job.root)

    @property
    def is_live(self) -> bool:
        return self.member.finish_reason is None

    def hear(self, token: int) -> FinishReason | None:
        """Take a token; return why the sequence ends with it, if it does."""
        assert self.job.beam is None, "a beam search is heard at its end"
        assert token == next_token(self._history, self.member.index), "not the token it gets alone"
        self._history = extend(self._history, token)
        self.output.append(token)
        return self.reason_to_end()

    def reason_to_end(self) -> FinishReason | None:
        """Return why the sequence ends with what has been heard. A stop precedes the length."""
        job, length = self.job, len(self.output)
        if not length:
            return None
        if self.output[-1] in job.eos | job.stops and length >= job.min_output:
            return FinishReason.STOP
        # An open end is where the pool ended when the request was taken.
        most = job.max_output or self.member.limit - len(job.prompt)
        return FinishReason.LENGTH if length >= most else None

    def stop_token_id(self) -> int | None:
        """Return the id that the sequence names as its stop."""
        if self.reason_to_end() is not FinishReason.STOP or self.output[-1] in self.job.eos:
            return None
        return self.output[-1]

    def verify_end(self, reason: FinishReason, num_output: int | None = None) -> None:
        """Prove that the member ended so, with what was heard, or the first of it."""
        member = self.member
        assert member.finish_reason is reason, f"ended with {member.finish_reason}, not {reason}"
        if num_output is not None:
            del self.output[num_output:]
        if self.job.beam is None or self.output:
            assert member.output_token_ids().tolist() == self.output, "not what was delivered"
        assert member.row is None
        assert not member.blocks

    def verify_search(self, beam: BeamOptions) -> int:
        """Prove that a beam search found what it finds alone. Return the tokens of all it found."""
        member, job = self.member, self.job
        assert job.max_output is not None
        alone = search_alone(job.prompt, beam, job.stopping, job.max_output, job.root)
        assert member.hypotheses == alone, "not what the search finds alone"
        assert member.stop_token_id == alone[0].stop_token_id
        self.output = [*alone[0].tokens]
        self.verify_end(alone[0].reason)
        return sum(len(each.tokens) for each in alone)
