"""Text on both sides of the engine: prompts into token ids, token ids into text."""
