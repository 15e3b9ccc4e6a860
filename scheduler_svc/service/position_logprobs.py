"""What is told of tokens into the entries that a client reads: its own token, then the best."""

from collections.abc import Callable, Sequence

from pagemill.v1.inference_pb2 import PositionLogprobs, TokenLogprob
from scheduler_svc.core.told import PromptTable, TokenTold

Piece = Callable[[int], bytes]
"""Returns a token's own text."""


def position_logprobs(
    token_id: int, told: TokenTold, num_candidates: int, piece: Piece
) -> PositionLogprobs:
    """Return the entries of one position: its token, and so many of the likeliest.

    The token stands first, and not again among the likeliest: k or k + 1 entries.
    """
    best = zip(told.ids[:num_candidates], told.logprobs[:num_candidates], strict=True)
    return PositionLogprobs(
        entries=[
            TokenLogprob(
                token_id=token_id, logprob=told.logprob, rank=told.rank, text=piece(token_id)
            ),
            *(
                TokenLogprob(token_id=id_, logprob=logprob, rank=rank, text=piece(id_))
                for rank, (id_, logprob) in enumerate(best, 1)
                if id_ != token_id
            ),
        ]
    )


def prompt_logprobs(
    prompt: Sequence[int], table: PromptTable, num_candidates: int, piece: Piece
) -> list[PositionLogprobs]:
    """Return the entries of all prompt positions, the first of which has none.

    Cost: 1 us an entry.
    """
    columns = zip(
        prompt[1:],
        table.logprobs.tolist(),
        table.ranks.tolist(),
        table.candidate_ids[:, :num_candidates].tolist(),
        table.candidate_logprobs[:, :num_candidates].tolist(),
        strict=True,
    )
    return [
        PositionLogprobs(),
        *(
            position_logprobs(
                token_id, TokenTold(logprob, rank, tuple(ids), tuple(best)), num_candidates, piece
            )
            for token_id, logprob, rank, ids, best in columns
        ),
    ]
