"""How long a step takes on the accelerator that is simulated."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepCost:
    """A roofline: a step reads the weights or computes, whichever is longer, and reads the KV.

    The defaults are the paper's smallest server, OPT-13B in float16 on an A100 of 40 GB with
    15.7k slots: 26 GB of weights, 1,555 GB/s, 26 GFLOP a token at half of 312 TFLOP/s, 819,200
    bytes of keys and values a token.

    Source: arXiv:2309.06180, Table 1.
    """

    fixed_ns: int = 1_000_000
    """Launches, sampling, the way to the worker and back."""

    weights_ns: int = 16_720_000
    """Reading every weight once."""

    token_ns: float = 166_700.0
    """Computing one token."""

    context_token_ns: float = 527.0
    """Reading keys and values of one token."""

    def step_ns(self, num_tokens: int, num_context_tokens: int) -> int:
        """Return the length of a step that runs and attends to so many tokens, over all rows."""
        compute_ns = max(self.weights_ns, num_tokens * self.token_ns)
        return round(self.fixed_ns + compute_ns + num_context_tokens * self.context_token_ns)
