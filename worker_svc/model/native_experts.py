"""A mixture of experts in native code: `kernels.cpu_experts` over layers that it can call."""

from collections.abc import Sequence

from kernels.cpu_build import native_code
from kernels.cpu_experts import CpuExperts
from kernels.native_linear import native_of
from worker_svc.model.experts import Experts
from worker_svc.model.model_config import ExpertsConfig
from worker_svc.model.operations import Linear, Mlp


def native_experts(router: Linear, experts: Sequence[Mlp], config: ExpertsConfig) -> Linear:
    """Return the mixture; torch's, if some part has no native code."""
    code, native_router = native_code(), native_of(router)
    natives = [
        (gate_up, down)
        for expert in experts
        if (gate_up := native_of(expert.gate_up)) is not None
        and (down := native_of(expert.down)) is not None
    ]
    if code is None or native_router is None or len(natives) < len(experts):
        return Experts(router, experts, config)
    return CpuExperts(
        native_router,
        natives,
        num_chosen=config.num_chosen,
        sums_to_one=config.sums_to_one,
        owners=(router, experts),
        code=code,
    )
