"""The two 8-bit floats of a KV cache, in integer arithmetic on loaded tiles. No pointers.

Triton has no e4m3 before sm_89, and its interpreter rounds neither as GPUs do. Bytes and shifts
give the same bits everywhere: a block written on one machine reads the same on every other.

    e4m3  s eeee mmm   largest 448,   no infinity, one NaN pattern
    e5m2  s eeeee mm   largest 57344, the upper half of a float16
"""

import triton
import triton.language as tl


@triton.jit
def dequantise(tile, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Turn a loaded tile of the cache into DTYPE, before its scale. Exact for 16 bits and more."""
    if FORMAT == "e4m3":
        values = decode_e4m3(tile).to(DTYPE)
    elif FORMAT == "e5m2":
        values = (tile.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32).to(DTYPE)
    else:
        values = tile.to(DTYPE)
    return values


@triton.jit
def quantise(value, scale, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Turn values into what the cache holds: value / scale, rounded to even, clamped."""
    if FORMAT == "plain":
        stored = value.to(DTYPE)
    else:
        # Not `/`, which is an approximation on a GPU: two machines must write the same byte.
        value = value.to(tl.float32)
        scaled = tl.div_rn(value, scale + tl.zeros_like(value))
        stored = encode_fp8(scaled, 2 if FORMAT == "e5m2" else 3)
    return stored


@triton.jit
def decode_e4m3(byte):
    """Return the fp32 value of each byte."""
    magnitude = (byte & 0x7F).to(tl.uint16)
    bits = ((byte & 0x80).to(tl.uint16) << 8) | (magnitude << 7)
    # In float16's fields the number is 2**8 too small: the exponent biases are 7 and 15.
    value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where(magnitude == 0x7F, float("nan"), value)


@triton.jit
def encode_fp8(value, MANTISSA: tl.constexpr):
    """Return the byte nearest to each fp32 value: to even, clamped to the largest, NaN kept.

    MANTISSA is 3 for e4m3 and 2 for e5m2.
    """
    BIAS: tl.constexpr = 7 if MANTISSA == 3 else 15
    LARGEST: tl.constexpr = 0x7E if MANTISSA == 3 else 0x7B
    DROPPED: tl.constexpr = 23 - MANTISSA
    # Adding 2**23 units of the smallest subnormal leaves the count of units in the low bits.
    UNITS: tl.constexpr = float(2 ** (23 + 1 - BIAS - MANTISSA))
    UNITS_BITS: tl.constexpr = (23 + 1 - BIAS - MANTISSA + 127) << 23

    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    to_even = (1 << (DROPPED - 1)) - 1 + ((magnitude >> DROPPED) & 1)
    normal = ((magnitude + to_even) >> DROPPED) - ((127 - BIAS) << MANTISSA)
    subnormal = (tl.abs(value) + UNITS).to(tl.int32, bitcast=True) - UNITS_BITS
    smallest_normal: tl.constexpr = (127 + 1 - BIAS) << 23
    code = tl.where(magnitude < smallest_normal, subnormal, tl.minimum(normal, LARGEST))
    # Infinity is clamped as every large value is. NaN has the largest magnitudes of all.
    code = tl.where(magnitude > 0x7F800000, 0x7F, tl.where(magnitude == 0x7F800000, LARGEST, code))
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
