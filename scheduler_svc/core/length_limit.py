"""How long a request may become: by its own word, by the model, and by the pool."""

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
    slots = pool.num_unpinnable * limits.block_size
    if wanted is None and prompt <= slots:
        return min(longest, slots + 1)
    needed = prompt + (wanted or 1) - 1
    if needed > slots:
        raise NeverFitsError(
            "prompt",
            f"prompt of {prompt} tokens and max_tokens of {wanted or 1} need {needed} slots of "
            f"KV memory, {_what_has(pool)} {slots}",
        )
    return needed + 1


def _what_has(pool: BlockPool) -> str:
    if pool.num_unpinnable < pool.num_blocks:
        return "the pool less what may be pinned has"
    return "the whole pool has"
