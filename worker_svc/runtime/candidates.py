"""The likeliest tokens behind a row, with their log-probabilities: what beams choose from."""

import numpy as np
import torch

from worker_svc.runtime.step_plan import Candidates, Int64Array


def find_candidates(logits: torch.Tensor, counts: Int64Array) -> Candidates:
    """Return so many of each row's likeliest tokens, or all if there are not as many.

    Shapes: logits [S, V] fp32, finite or -inf; counts [S]. At least one count is not 0.

    Numerics: log-probabilities are the log-softmax in fp32. Among equal logits the lower id is
        the more likely one, as in `sample`.

    Cost: on the device one pass over the logits of the rows that are asked for, and a top-k;
        what comes back are the candidates, and tokens that tie with a row's last.
    """
    asked = np.flatnonzero(counts)
    wanted = np.minimum(counts[asked], logits.shape[1])
    scores = logits[torch.from_numpy(asked).to(logits.device)]
    # top-k breaks ties as it likes: it says how deep to look, not which tokens to take.
    best = scores.topk(int(wanted.max())).values
    deepest = best.gather(1, torch.from_numpy(wanted - 1).to(logits.device)[:, None])
    places = (scores >= deepest).nonzero(as_tuple=True)
    places_and_values = (*places, scores[places], torch.log_softmax(scores, dim=-1)[places])
    rows, ids, values, logprobs = (column.cpu().numpy() for column in places_and_values)

    order = np.lexsort((ids, -values, rows))
    found = np.bincount(rows, minlength=len(asked))
    nth = np.arange(len(order)) - np.repeat(np.cumsum(found) - found, found)
    kept = order[nth < np.repeat(wanted, found)]
    num_candidates = np.zeros(len(counts), dtype=np.int32)
    num_candidates[asked] = wanted
    return Candidates(
        ids=ids[kept].astype(np.int32), logprobs=logprobs[kept], counts=num_candidates
    )
