"""How a checkpoint's weights are quantised, read from its `config.json` and checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from worker_svc.errors import ModelError
from worker_svc.model.fields import Fields
from worker_svc.model.model_config import unknown

SUPPORTED: Final = (
    "fp8 and fbgemm_fp8 (e4m3)",
    "compressed-tensors (fp8 e4m3, int8, int4)",
    "awq (gemm, 4 bits)",
    "gptq (4 or 8 bits)",
)
"""What is read, as errors list it."""

_CT_FORMATS: Final = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
_CT_STRATEGIES: Final = ("tensor", "channel", "group", "block")


class Layout(Enum):
    """How the values of one matrix lie in a file."""

    PLAIN = auto()
    """`weight` [O, I] in fp8 or int8, with `weight_scale` or `weight_scale_inv`."""

    ROWS = auto()
    """`weight_packed`: int32 of several inputs of one output each, of compressed-tensors."""

    AWQ = auto()
    """`qweight`: int32 of eight outputs of one input each, in an order of its own."""

    GPTQ = auto()
    """`qweight`: int32 of several inputs of one output each, inputs first."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """What all quantised matrices of a checkpoint have in common."""

    layout: Layout

    method: str
    """As config.json names it."""

    bits: int
    """Of a value: 4 or 8."""

    is_float: bool = False
    """Whether values are fp8 (e4m3). Otherwise they are integers."""

    block: tuple[int | None, int | None] | None = None
    """Outputs and inputs that share a scale; None in it: all. None: one for all, or one a row."""

    zero_offset: int = 0
    """What zero points are stored less by: 1 in old GPTQ files."""


def quantisation_from_hf(values: Mapping[str, object]) -> Quantisation | None:
    """Return how a `config.json` says that weights are quantised; None if it does not.

    The lists of modules that are not quantised are not read: the tensors there are say it.

    Raises: ModelError for whatever is not supported, naming it and what is, or for a field that is
        missing or impossible.
    """
    fields = Fields(values, "config.json")
    # compressed-tensors called it so at first.
    names = [name for name in ("quantization_config", "compression_config") if fields.has(name)]
    if not names:
        return None
    inner = fields.group(names[0])
    match method := inner.text("quant_method"):
        case "fp8" | "fbgemm_fp8":
            return _plain_fp8(inner, method)
        case "compressed-tensors":
            return _compressed_tensors(inner)
        case "awq":
            return _awq(inner)
        case "gptq":
            return _gptq(inner)
        case _:
            raise unknown("quant_method", method, SUPPORTED)


def _plain_fp8(fields: Fields, method: str) -> Quantisation:
    if (kind := fields.text("fmt", "e4m3")) not in {"e4m3", "float8_e4m3fn"}:
        raise unknown("fmt of fp8", kind, ("e4m3",))
    block: tuple[int | None, int | None] | None = None
    if fields.has("weight_block_size"):
        block = _block(fields, "weight_block_size")
    return Quantisation(Layout.PLAIN, method, 8, is_float=True, block=block)


def _awq(fields: Fields) -> Quantisation:
    _refuse_other_bits(fields, "awq", (4,))
    if (version := fields.text("version", "gemm").lower()) != "gemm":
        raise unknown("version of awq", version, ("gemm",))
    if not fields.flag("zero_point", default=True):
        raise ModelError("zero_point of awq is false, must be true")
    return Quantisation(Layout.AWQ, "awq", 4, block=(1, _group_size(fields)))


def _gptq(fields: Fields) -> Quantisation:
    bits = _refuse_other_bits(fields, "gptq", (4, 8))
    form = fields.text("checkpoint_format", "gptq").lower()
    if fields.flag("is_marlin_format", default=False):
        form = "marlin"
    if form not in {"gptq", "gptq_v2"}:
        raise unknown("checkpoint_format of gptq", form, ("gptq", "gptq_v2"))
    # "-:pattern" leaves modules as they are, which their tensors show.
    for pattern in fields.group("dynamic").names:
        if not pattern.startswith("-:"):
            raise ModelError(
                f"dynamic of gptq has {pattern[:100]!r}: layers that differ are not supported"
            )
    offset = 1 if form == "gptq" else 0
    return Quantisation(
        Layout.GPTQ, "gptq", bits, block=(1, _group_size(fields)), zero_offset=offset
    )


def _compressed_tensors(fields: Fields) -> Quantisation:
    sparse = fields.group("sparsity_config").text("format", "dense")
    if sparse != "dense":
        raise unknown("sparsity_config of compressed-tensors", sparse, ("dense",))
    if fields.group("transform_config").group("config_groups").names:
        raise ModelError("transform_config of compressed-tensors is set, must be empty")
    groups = fields.group("config_groups")
    if not groups.names:
        raise ModelError("config_groups of compressed-tensors is empty, must have one")
    found = {_scheme(groups.group(name), fields) for name in groups.names}
    if len(found) > 1:
        raise ModelError(
            f"config_groups of compressed-tensors differ ({', '.join(groups.names)}), must agree"
        )
    return found.pop()


def _scheme(group: Fields, fields: Fields) -> Quantisation:
    """Return what one of `config_groups` says."""
    method = "compressed-tensors"
    form = fields.text("format")
    if form == "mixed-precision":
        form = group.text("format")
    if form not in _CT_FORMATS:
        raise unknown(f"format of {method}", form, _CT_FORMATS)
    if not group.has("weights"):
        raise ModelError(f"config_groups of {method}: weights is null, must be a mapping")
    weights = group.group("weights")
    kind, bits = weights.text("type", "int"), weights.count("num_bits", 8)
    is_packed = form == "pack-quantized"
    if (kind, bits) not in ({("int", 4), ("int", 8)} if is_packed else {("int", 8), ("float", 8)}):
        known = ("int4", "int8") if is_packed else ("int8", "float8")
        raise unknown(f"weights of {method}, {form}", f"{kind}{bits}", known)
    strategy = weights.text("strategy", "group" if weights.has("group_size") else "tensor")
    if strategy not in _CT_STRATEGIES:
        raise unknown(f"strategy of {method}", strategy, _CT_STRATEGIES)
    block: tuple[int | None, int | None] | None = None
    if strategy == "group":
        block = (1, _group_size(weights))
    elif strategy == "block":
        block = _block(weights, "block_structure")
    layout = Layout.ROWS if is_packed else Layout.PLAIN
    return Quantisation(layout, method, bits, is_float=kind == "float", block=block)


def _refuse_other_bits(fields: Fields, method: str, known: tuple[int, ...]) -> int:
    # AutoAWQ and AutoGPTQ have had two names for it.
    name = "bits" if fields.has("bits") else "w_bit"
    if (bits := fields.count(name)) not in known:
        raise unknown(f"bits of {method}", str(bits), [str(one) for one in known])
    return bits


def _group_size(fields: Fields) -> int | None:
    """Return how many inputs share a scale; None if all do."""
    name = "q_group_size" if fields.has("q_group_size") else "group_size"
    return None if fields.integer(name) == -1 else fields.count(name)


def _block(fields: Fields, name: str) -> tuple[int, int]:
    sizes = fields.indices(name)
    if len(sizes) != 2 or not all(sizes):
        raise ModelError(f"{name} is {sizes}, must be two positive integers")
    return sizes[0], sizes[1]
