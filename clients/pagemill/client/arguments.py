"""What a caller may ask of one generation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

JsonObject = Mapping[str, Any]
"""Members of a JSON object, as `json.dumps` takes them."""


@dataclass(frozen=True, slots=True)
class EmbeddingSpan:
    """Embeddings in place of some tokens of a prompt, as a vision encoder makes them."""

    offset: int
    """Position of the first; the prompt's ids from there on are placeholders."""

    content_id: str
    """Identifies the content. Cached blocks are shared where id and embeddings are equal."""

    embeddings: bytes
    """Vectors of the model's hidden size, one behind the other, little-endian."""

    element_type: Literal["float16", "float32", "bfloat16"] = "float32"


class ChatArguments(TypedDict, total=False):
    """A conversation, as keyword arguments."""

    messages: Sequence[JsonObject] | None
    """A conversation: objects with role, content, and what else the chat template reads."""

    tools: Sequence[JsonObject] | None
    """Tools offered to the model, handed to the chat template."""

    template_arguments: JsonObject | None
    """Further variables of the chat template."""

    continue_last_message: bool
    """The last message is continued; no turn is opened for the assistant."""


class GenerateArguments(ChatArguments, total=False):
    """Keyword arguments of `generate` and `complete`.

    One of `prompt` and `messages` is needed. What is left out, or None, takes the model's
    default. Bounds are the server's, which names them when it refuses.
    """

    prompt: str | Sequence[int] | None
    """What to continue: text, or token ids taken as they are."""

    model: str
    """A served name; empty is the only one."""

    request_id: str
    """Unique among the tenant's live requests; empty lets the server choose."""

    tenant: str
    """On whose behalf; empty is the default tenant."""

    priority: int
    """Lower runs first, under a policy that looks at it."""

    adapter: str
    """Name of a loaded adapter; empty is none."""

    embeddings: Sequence[EmbeddingSpan] | None
    """In place of tokens, in order of position."""

    temperature: float | None
    """0 takes the most likely token."""

    top_k: int | None
    """Only the k likeliest; 0 and -1 are all."""

    top_p: float | None
    """Only the smallest set that reaches this probability."""

    min_p: float | None
    """Only tokens this many times as likely as the likeliest."""

    seed: int | None
    """Makes the draw reproducible."""

    n: int | None
    """Sequences for the one prompt: at most as many as the server has in a step."""

    beam_width: int | None
    """Hypotheses of a beam search, at least 2, in place of sampling."""

    length_penalty: float | None
    """With beams: score = cumulative log-probability / generated length ^ this. Default 1."""

    early_stopping: bool | Literal["never"] | None
    """With beams: whether the search ends once it has beam_width results; see the protocol."""

    num_returned: int | None
    """With beams: the best to return, at most beam_width. Default 1."""

    presence_penalty: float | None
    """Subtracted once from the logit of each token in the output."""

    frequency_penalty: float | None
    """Subtracted once per occurrence."""

    repetition_penalty: float | None
    """Divides positive, multiplies negative logits of tokens seen."""

    logit_bias: Mapping[int, float] | None
    """Added to the logits of these ids."""

    allowed_token_ids: Sequence[int] | None
    """Only these may be drawn: at least one."""

    bad_words: Sequence[str] | None
    """Strings that must not appear."""

    max_tokens: int | None
    """Most tokens to generate."""

    min_tokens: int | None
    """Tokens before any stop condition counts."""

    stop: str | Sequence[str] | None
    """Texts that end the output."""

    stop_token_ids: Sequence[int] | None
    """Token ids that end the output."""

    ignore_eos: bool
    """End-of-sequence ids are tokens like any other."""

    include_stop_string: bool
    """The stop string that ended the output is part of the text."""

    omit_text: bool
    """Token ids only."""

    keep_special_tokens: bool
    """Special tokens appear in the text."""

    logprobs: int | None
    """Log-probabilities at each output position: the drawn token's and the k best."""

    prompt_logprobs: int | None
    """The same for each prompt position."""

    echo: bool
    """The output begins with the prompt."""

    min_interval_s: float
    """Least seconds between two messages; tokens pile up meanwhile."""

    salt: str
    """Only requests with an equal salt share cached prefixes."""

    read_cache: bool | None
    """False computes the prompt anew."""
