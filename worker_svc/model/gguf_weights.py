"""Tensors of a GGUF file, dequantised, under their Hugging Face names and in that layout."""

from math import prod
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from gguf import dequantize

from worker_svc.errors import ModelError
from worker_svc.model.gguf_file import GgufFile, GgufTensor
from worker_svc.model.model_config import ModelConfig

ROPE_DIVISORS = "rope_freqs.weight"

_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    ROPE_DIVISORS: ROPE_DIVISORS,
}


class GgufWeights:
    """Reads tensors from a file. A context manager; leaving it closes the file."""

    __slots__ = ("_config", "_opened", "_tensors")

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._config = config
        self._tensors = {_hf_name(name): tensor for name, tensor in file.tensors.items()}
        self._opened = file.path.open("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._opened.close()

    @property
    def names(self) -> frozenset[str]:
        """The tensors there are, by their Hugging Face names."""
        return frozenset(self._tensors)

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor in fp32. It must be among `names`.

        Raises: ModelError if it is packed in a way the `gguf` package cannot unpack.
        """
        tensor = self._tensors[name]
        weight = torch.from_numpy(self._unpack(tensor))
        # Llama's GGUF files hold the rotary pairs of Q and K side by side, (2i, 2i + 1);
        # the model wants them half a head apart, (i, i + D / 2).
        if ".attn_q." in tensor.name:
            return self._halves_apart(name, weight, self._config.num_heads)
        if ".attn_k." in tensor.name:
            return self._halves_apart(name, weight, self._config.num_kv_heads)
        return weight

    def _halves_apart(self, name: str, weight: torch.Tensor, heads: int) -> torch.Tensor:
        if len(weight) != (rows := heads * self._config.head_dim):
            raise ModelError(f"tensor {name} is {list(weight.shape)}, must have {rows} rows")
        return halves_apart(weight, heads)

    def _unpack(self, tensor: GgufTensor) -> npt.NDArray[np.float32]:
        packed = np.empty(
            (*tensor.shape[:-1], tensor.num_bytes // prod(tensor.shape[:-1])), np.uint8
        )
        self._opened.seek(tensor.offset)
        if self._opened.readinto(packed.data) != tensor.num_bytes:
            raise ModelError(f"{tensor.name} is cut short")
        try:
            values: npt.NDArray[np.float32] = dequantize(packed, tensor.kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{tensor.name} is packed as {tensor.kind.name}, which is not known"
            ) from error
        return values.reshape(tensor.shape)


def halves_apart(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo the order of rotary pairs in GGUF: row 2i + j of a head becomes row j * D / 2 + i.

    Shapes: weight [heads * D, ...], and the same returned.
    """
    pairs = weight.view(heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _hf_name(name: str) -> str:
    """Return the Hugging Face name, or the name itself if there is none."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    match name.split("."):
        case ["blk", layer, part, kind] if part in _IN_LAYER:
            return f"model.layers.{layer}.{_IN_LAYER[part]}.{kind}"
    return name
