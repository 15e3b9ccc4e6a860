"""Which file runs which model family."""

from collections.abc import Callable, Mapping
from typing import Final

from worker_svc.model.causal_model import CausalModel
from worker_svc.model.gemma3 import Gemma3
from worker_svc.model.llama import Llama
from worker_svc.model.loader import Loader
from worker_svc.model.mixtral import Mixtral
from worker_svc.model.model_config import Family
from worker_svc.model.qwen3 import Qwen3
from worker_svc.model.qwen3_moe import Qwen3Moe

FAMILIES: Final[Mapping[Family, Callable[[Loader], CausalModel]]] = {
    Family.LLAMA: Llama,
    Family.QWEN3: Qwen3,
    Family.GEMMA3: Gemma3,
    Family.MIXTRAL: Mixtral,
    Family.QWEN3_MOE: Qwen3Moe,
}
"""What loads a model, by its family."""
