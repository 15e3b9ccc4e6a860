"""Layers and weights: from a model's files to logits. Torch only."""
