"""What the public servicers know of the model, the limits and the observers: made once."""

from dataclasses import dataclass

from scheduler_svc.core.errors import UnknownModelError
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.request import Sampling
from scheduler_svc.service.field_bounds import quoted
from scheduler_svc.service.metrics import RequestMetrics
from scheduler_svc.service.prompt_reading import PromptReader
from scheduler_svc.service.request_trace import RequestTracer
from scheduler_svc.service.sampling_reading import model_sampling
from scheduler_svc.service.text.chat_template import ChatTemplate
from scheduler_svc.service.text.model_facts import ModelFacts
from scheduler_svc.service.text.tokenizer import Tokenizer

DEFAULT_MAX_LOGPROBS = 20
"""As in vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEnd:
    """One served model, and how it is served."""

    served_names: tuple[str, ...]
    """Names a request may call the model by; at least one, the first is the default."""

    facts: ModelFacts
    tokenizer: Tokenizer
    prompts: PromptReader

    sampling: Sampling
    """Values for what a request leaves unset. The seed means nothing."""

    limits: Limits

    max_logprobs: int
    """Most candidates that a request may ask for at each position."""

    version: str
    """The product's."""

    protocol_version: int
    """Of the protocol between scheduler and workers."""

    metrics: RequestMetrics

    tracer: RequestTracer | None
    """None: no request is traced."""

    @classmethod
    def for_model(
        cls,
        facts: ModelFacts,
        tokenizer: Tokenizer,
        *,
        served_names: tuple[str, ...],
        limits: Limits,
        max_logprobs: int = DEFAULT_MAX_LOGPROBS,
        version: str,
        protocol_version: int,
        metrics: RequestMetrics,
        tracer: RequestTracer | None = None,
    ) -> "FrontEnd":
        """Make the front end of a model.

        Raises: ConfigError if its chat template or its default sampling is impossible.
        """
        template = ChatTemplate(
            facts.chat_template, facts.tool_chat_template, special_tokens=facts.special_tokens
        )
        return cls(
            served_names=served_names,
            facts=facts,
            tokenizer=tokenizer,
            prompts=PromptReader(tokenizer, template, facts.vocab_size, limits.max_model_len),
            sampling=model_sampling(facts),
            limits=limits,
            max_logprobs=max_logprobs,
            version=version,
            protocol_version=protocol_version,
            metrics=metrics,
            tracer=tracer,
        )

    def model_name(self, asked: str) -> str:
        """Return the name of the model that a request asks for; empty asks for the default.

        Raises: UnknownModelError.
        """
        if asked and asked not in self.served_names:
            served = ", ".join(self.served_names)
            raise UnknownModelError(f"model {quoted(asked)} is not served, only {served}")
        return asked or self.served_names[0]
