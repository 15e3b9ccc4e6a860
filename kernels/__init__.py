"""Kernels over plain tensors. They know nothing of requests, models or services.

One letter per dimension, the same in every kernel:

    T  tokens in the step             N  blocks in the cache
    R  requests in the step           S  slots in a block (block_size)
    H  query heads                    B  block-table width
    G  key/value heads, H % G == 0    D  head dimension
"""
