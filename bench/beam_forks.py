"""Records which beam each beam goes on from, step by step, with the demo model's logits.

    PYTHONPATH=.:proto:tests python bench/beam_forks.py MODEL.gguf --width 2 --width 4 --width 6

`pagemill simulate --beam-width` replays what this writes: scheduler_svc/simulate/beam_parents.npz.
Prompts of a chat are continued by beam search of each width in float32; the end of sequence is
never taken, so that every search is as long as another. An array of the file, `width_W`, has shape
[prompts, steps, W], uint8: at [p, t, b] the beam of step t - 1 whose tokens beam b of step t
continues, best beam first. Widths that the file has and that are not asked for stay in it.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, LlamaForCausalLM

from scheduler_svc.service.text.tokenizer import Tokenizer
from transformers_oracle import load_demo

OUT = Path(__file__).parent.parent / "scheduler_svc/simulate/beam_parents.npz"

END_OF_TURN = 2
"""The id that ends an answer of the demo model."""

QUESTIONS = (
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Explain how photosynthesis works to a ten-year-old.",
    "What are the main differences between TCP and UDP, and when would you use each?",
    "Give me a recipe for a vegetable soup with what is in season in autumn.",
    "Write a Python function that merges two sorted lists, and explain its complexity.",
    "Plan a three-day trip to Lisbon for a family with small children.",
    "Summarise the causes of the First World War.",
    "I feel tired all the time. What could I change about my day?",
    "Draft an e-mail that asks a landlord to repair a broken heating.",
)


def search(
    model: LlamaForCausalLM, prompt: list[int], width: int, steps: int
) -> npt.NDArray[np.uint8]:
    """Return the parents of the beams of each step. Shape: [steps, width]."""
    cache = DynamicCache(config=model.config)
    tokens = torch.tensor([prompt])
    scores = torch.zeros(1)
    parents = np.zeros((steps, width), dtype=np.uint8)
    for step in range(steps):
        logits = model(tokens, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        logits[:, END_OF_TURN] = -torch.inf
        candidates = scores[:, None] + torch.log_softmax(logits.float(), dim=-1)
        scores, places = candidates.flatten().topk(width)
        rows, ids = places // logits.shape[1], places % logits.shape[1]
        parents[step] = rows.numpy()
        cache.batch_select_indices(rows)
        tokens = ids[:, None]
    return parents


def chat(tokenizer: Tokenizer, question: str) -> list[int]:
    """Lay a question out as the model's chat template does."""
    return tokenizer.encode(
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",
        add_special_tokens=False,
    )


def main() -> None:
    """Search with each width from each prompt, and write the parents."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--width", type=int, action="append", required=True)
    parser.add_argument("--steps", type=int, default=384)
    parser.add_argument("--prompts", type=int, default=len(QUESTIONS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = load_demo(options.model)
    tokenizer = Tokenizer.from_path(options.model)
    prompts = [chat(tokenizer, question) for question in QUESTIONS[: options.prompts]]
    found: dict[str, npt.NDArray[np.uint8]] = {}
    if options.out.exists():
        found.update(np.load(options.out))
    for width in options.width:
        begin = time.monotonic()
        with torch.inference_mode():
            parents = [search(model, prompt, width, options.steps) for prompt in prompts]
        found[f"width_{width}"] = np.stack(parents)
        np.savez_compressed(options.out, **found)
        print(f"width {width}: {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
