"""How long a request may become: by its own word, by the model, and by the pool."""

from bisect import bisect_right

from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.errors import InvalidRequestError, NeverFitsError
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.request import Request


def length_limit(request: Request, limits: Limits, pool: BlockPool | None) -> int:
    """Return the tokens, prompt and output, at which a request ends.

    An open end is cut to what fits; an explicit one that cannot fit is refused.

    Raises: InvalidRequestError or NeverFitsError, naming both numbers.
    """
    prompt, wanted = request.num_prompt_tokens, request.stopping.max_output_tokens
    longest = limits.max_model_len
    if prompt >= longest:
        raise InvalidRequestError(
            "prompt",
            f"prompt has {prompt} tokens, must be below the model's length of {longest}",
        )
    if wanted is not None and prompt + wanted > longest:
        raise InvalidRequestError(
            "max_tokens",
            f"max_tokens is {wanted} behind a prompt of {prompt} tokens, together they must be "
            f"at most the model's length of {longest}",
        )
    if pool is None:
        return longest if wanted is None else prompt + wanted
    # The last token is sampled, but never stored.
    width = request.width if request.awaits_fork or request.beam else 1
    if request.beam is not None:
        # Beams that come back take whole tables, windows or not.
        slots = num_slots(prompt, width, limits.block_size, pool.num_unpinnable // pool.num_groups)
    else:
        slots = _slots_of_groups(prompt, width, limits, pool)
    # A smaller pool than before may not hold what an open end has come to.
    known = request.num_tokens
    if wanted is None and known <= slots:
        return min(longest, slots + 1)
    needed = known if wanted is None else prompt + wanted - 1
    if needed > slots:
        family = f" for each of {width} sequences that share the prompt" if width > 1 else ""
        raise NeverFitsError(
            "prompt",
            f"prompt of {prompt} tokens and max_tokens of {needed - prompt + 1} need {needed} "
            f"slots of KV memory{family}, {_what_has(pool)} {slots}",
        )
    return needed + 1


def check_width(request: Request, limits: Limits) -> None:
    """Check that a family is of one kind and can have its rows. Raises: InvalidRequestError."""
    if request.beam is not None and request.num_sequences != 1:
        raise InvalidRequestError(
            "n", f"n is {request.num_sequences} beside a beam search, must be 1"
        )
    if not 1 <= request.width <= limits.max_num_seqs:
        raise InvalidRequestError(
            "beam.width" if request.beam else "n",
            f"{'beam.width' if request.beam else 'n'} is {request.width}, must be 1 to "
            f"{limits.max_num_seqs}, the most sequences that run at once",
        )


def num_slots(num_prompt_tokens: int, width: int, block_size: int, num_blocks: int) -> int:
    """Return how many tokens each sequence of a family can store at most, prompt included.

    Full blocks of the prompt are shared. Of the others each sequence has its own, unless all end
    with their first token.
    """
    if width == 1:
        return num_blocks * block_size
    shared = min(num_prompt_tokens // block_size, num_blocks)
    own = (num_blocks - shared) // width
    if own == 0 and -(-num_prompt_tokens // block_size) <= num_blocks:
        return num_prompt_tokens
    return (shared + own) * block_size


def _slots_of_groups(num_prompt_tokens: int, width: int, limits: Limits, pool: BlockPool) -> int:
    """Return as `num_slots` does, for the KV groups of a pool. Windows bound what a row holds."""
    groups, block_size = pool.groups, limits.block_size
    num_blocks = pool.num_unpinnable
    if all(group.sees_all for group in groups):
        return num_slots(num_prompt_tokens, width, block_size, num_blocks // len(groups))

    def needs(num_tokens: int) -> int:
        whole = -(-num_tokens // block_size)
        shared = num_prompt_tokens // block_size if num_tokens > num_prompt_tokens else whole
        return sum(
            min(
                shared + width * (whole - shared),
                (width if whole > shared else 1)
                * group.most_blocks(num_tokens, limits.max_step_row_tokens, block_size),
            )
            for group in groups
        )

    return bisect_right(range(1, limits.max_model_len + 1), num_blocks, key=needs)


def _what_has(pool: BlockPool) -> str:
    if pool.num_unpinnable < pool.num_blocks:
        return "the pool less what may be pinned has"
    return "the whole pool has"
