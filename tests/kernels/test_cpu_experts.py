"""A mixture of experts in native code is the weighted sum of each token's likeliest experts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from kernels.activation import Activation
from kernels.cpu_build import native_code
from kernels.cpu_experts import CpuExperts
from kernels.native_linear import NativeLinear
from kernels.packed_linear import PackedLinear
from native_variants import drawn, variant, variants
from paged_cases import assert_rounded_once

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
HIDDEN, INNER = 40, 24

pytestmark = pytest.mark.skipif(native_code() is None, reason="this machine compiles no C++")


def native(linear: PackedLinear) -> NativeLinear:
    assert linear.native is not None
    return linear.native


class Mixture:
    """Random experts behind a random router, and what they must compute."""

    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        num_experts: int,
        num_chosen: int,
        *,
        sums_to_one: bool,
        router: torch.Tensor | None = None,
    ) -> None:
        """Make them, with a router's weight [num_experts, HIDDEN], random if not given."""
        code = variant(name)
        self.num_chosen, self.sums_to_one = num_chosen, sums_to_one
        drawn_router = drawn(7, num_experts, HIDDEN, dtype=dtype)
        self.router = PackedLinear(drawn_router if router is None else router, code=code)
        self.experts = [
            (
                PackedLinear(
                    drawn(10 + number, 2 * INNER, HIDDEN, dtype=dtype) / 8,
                    gate=Activation.SILU,
                    code=code,
                ),
                PackedLinear(drawn(90 + number, HIDDEN, INNER, dtype=dtype) / 8, code=code),
            )
            for number in range(num_experts)
        ]
        self.native = CpuExperts(
            native(self.router),
            [(native(gate_up), native(down)) for gate_up, down in self.experts],
            num_chosen=num_chosen,
            sums_to_one=sums_to_one,
            owners=(self.router, self.experts),
            code=code,
        )

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        """Return each token's sum in fp32, over what the same layers give it alone."""
        sums = torch.zeros(x.shape)
        for token, logits in enumerate(self.router(x).float()):
            # Of equal ones the lower number comes first.
            chosen = sorted(range(len(logits)), key=lambda expert: (-logits[expert], expert))
            chosen = chosen[: self.num_chosen]
            weights = functional.softmax(logits.double(), dim=0)[chosen]
            if self.sums_to_one:
                weights = weights / weights.sum()
            for expert, weight in zip(chosen, weights, strict=True):
                gate_up, down = self.experts[expert]
                sums[token] += down(gate_up(x[token : token + 1]))[0].float() * weight.float()
        return sums


@variants
@settings(max_examples=15)
@given(
    rows=st.integers(0, 40),
    num_experts=st.integers(1, 9),
    share=st.floats(0, 1),
    dtype=st.sampled_from([FP32, BF16, FP16]),
    sums_to_one=st.booleans(),
)
def test_each_token_gets_the_weighted_sum_of_its_likeliest_experts(
    name: str, rows: int, num_experts: int, share: float, dtype: torch.dtype,
    *, sums_to_one: bool,
) -> None:  # fmt: skip
    num_chosen = 1 + round(share * (num_experts - 1))
    mixture = Mixture(name, dtype, num_experts, num_chosen, sums_to_one=sums_to_one)
    wide = drawn(rows, rows, HIDDEN + 3, dtype=dtype)
    x = wide[:, 3:]  # rows need not follow one another
    assert_rounded_once(mixture.native(x), mixture.expected(x))


def test_of_equal_logits_the_lower_expert_is_chosen() -> None:
    router = drawn(7, 1, HIDDEN, dtype=BF16).repeat(6, 1)
    mixture = Mixture("native", BF16, 6, 2, sums_to_one=True, router=router)
    x = drawn(1, 3, HIDDEN, dtype=BF16)
    assert_rounded_once(mixture.native(x), mixture.expected(x))


def test_of_equal_logits_the_higher_expert_gives_way_to_a_likelier_one() -> None:
    row = drawn(7, 1, HIDDEN, dtype=BF16)
    mixture = Mixture("native", BF16, 3, 2, sums_to_one=True, router=torch.cat([row, row, 2 * row]))
    x = row / 40  # logits about 1, 1 and 2
    assert_rounded_once(mixture.native(x), mixture.expected(x))


def test_a_token_gets_the_same_alone_and_among_others() -> None:
    mixture = Mixture("native", BF16, 8, 3, sums_to_one=False)
    x = drawn(3, 60, HIDDEN, dtype=BF16)
    together = mixture.native(x)
    for token in (0, 17, 59):
        assert torch.equal(mixture.native(x[token : token + 1])[0], together[token])


def test_what_does_not_fit_is_refused() -> None:
    mixture = Mixture("native", FP32, 3, 2, sums_to_one=False)
    router, experts = native(mixture.router), [(native(a), native(b)) for a, b in mixture.experts]
    code = native_code()
    assert code is not None
    with pytest.raises(ValueError, match="x is"):
        mixture.native(torch.zeros(2, HIDDEN + 1))
    with pytest.raises(ValueError, match="router has 3 outputs for 2 experts"):
        CpuExperts(router, experts[:2], num_chosen=2, sums_to_one=True, owners=(), code=code)
    with pytest.raises(ValueError, match="num_chosen is 4, must be 1 to 3"):
        CpuExperts(router, experts, num_chosen=4, sums_to_one=True, owners=(), code=code)
    odd = [experts[0], experts[1][::-1], experts[2]]
    with pytest.raises(ValueError, match="expert 1 is"):
        CpuExperts(router, odd, num_chosen=2, sums_to_one=True, owners=(), code=code)
