"""The worker: it holds the model and the KV cache, runs step plans, and decides nothing."""
