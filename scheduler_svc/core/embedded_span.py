"""Embeddings in place of tokens: what a request carries to the worker, besides its ids."""

from dataclasses import dataclass, replace

from scheduler_svc.core.block_hash import ContentSpan


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddedSpan:
    """Vectors that stand in place of some tokens of a prompt."""

    content: ContentSpan
    """What they are, for the names of blocks, and which positions they fill."""

    values: bytes
    """One vector a position, equally long, one behind the other."""

    element_type: int
    """As pagemill.v1.ElementType; the core does not look."""

    def behind(self, position: int) -> "EmbeddedSpan":
        """Return the part from a position on, which must be before its end."""
        skipped = position - self.content.start
        if skipped <= 0:
            return self
        content = replace(self.content, start=position, length=self.content.length - skipped)
        bytes_of_one = len(self.values) // self.content.length
        return replace(self, content=content, values=self.values[skipped * bytes_of_one :])


def not_computed(spans: tuple[EmbeddedSpan, ...], num_computed: int) -> tuple[EmbeddedSpan, ...]:
    """Return what a row needs of them whose first tokens are computed."""
    if not spans:
        return spans
    return tuple(span.behind(num_computed) for span in spans if span.content.end > num_computed)
