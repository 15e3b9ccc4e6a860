"""Draws the plots of docs/figures.md from replays of the real core, and writes their numbers.

    make figures

The bytes are the same on every machine with the versions of constraints.txt: virtual time, seeds,
and SVG without a date. Two minutes on one core of an AMD EPYC (Zen 4).
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scheduler_svc.simulate.options import read_options
from scheduler_svc.simulate.replay import make_load, make_paged, replay
from scheduler_svc.simulate.report import Report
from scheduler_svc.simulate.step_cost import StepCost

FOLDER = Path(__file__).parent.parent / "docs/figures"

LENGTHS = {"sharegpt": "ShareGPT", "alpaca": "Alpaca"}
ALLOCATORS = ("max", "pow2", "oracle", "paged")
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
WIDTHS = (2, 4, 6)
KV_SHARES = (1.0, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)

PAGEMILL = "pagemill simulate"
OURS, THEIRS, OTHER = "#1f6f8b", "#c9c9c9", "#e08e45"

# Source: arXiv:2309.06180, Figures 2, 13, 15 and 16.
PAPER_UTILISATION = {"max": 20.4, "pow2": 26.8, "oracle": 38.2, "paged": 96.3}
PAPER_BATCH = {"max": 7.00, "pow2": 9.81, "oracle": 13.62, "paged": 30.42}
PAPER_SAVED = {
    "n": {"sharegpt": (16.2, 30.5), "alpaca": (6.1, 9.8)},
    "beam-width": {"sharegpt": (44.3, 66.3), "alpaca": (37.6, 55.2)},
}

SEQUENCE_RATE = {"sharegpt": 2.4, "alpaca": 30.0}
"""Sequences a second where sharing is measured: nothing, or little, is preempted."""

Numbers = dict[str, object]


def main() -> None:
    """Draw all plots, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", choices=sorted(PLOTS), action="append")
    options = parser.parse_args()
    mpl.rcParams |= {"svg.hashsalt": "pagemill", "svg.fonttype": "none", "font.size": 10}
    FOLDER.mkdir(exist_ok=True)
    for name in options.only or PLOTS:
        begin = time.process_time()
        figure, numbers = PLOTS[name]()
        figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None, "Creator": None})
        text = json.dumps(numbers, indent=1, sort_keys=True) + "\n"
        (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")
        print(f"{name}: {time.process_time() - begin:.0f} s of a core", flush=True)


@cache
def simulate(*flags: str) -> Report:
    """Replay what these flags of `pagemill simulate` say."""
    options = read_options(flags)
    return replay(options, make_load(options), StepCost())


def full_pool(allocator: str) -> Report:
    """Replay more requests than the pool holds."""
    return simulate("--lengths=sharegpt", "--requests=1000", f"--allocator={allocator}")


def percent(share: float) -> float:
    """Return a share in percent, to a tenth."""
    return round(100 * share, 1)


def utilisation() -> tuple[Figure, Numbers]:
    """Share of the pool that holds tokens, by allocator."""
    ours = {each: percent(full_pool(each).utilisation_of_pool) for each in ALLOCATORS}
    figure, (axes,) = panels(1)
    bars(axes, ALLOCATORS, {"paper, Figure 2": PAPER_UTILISATION, PAGEMILL: ours})
    label(axes, "ShareGPT lengths, all requests at once", "% of slots that hold a token")
    return figure, {"pagemill": ours, "paper": PAPER_UTILISATION}


def batch() -> tuple[Figure, Numbers]:
    """Sequences that run at once in a full pool, by allocator."""
    ours = {each: round(full_pool(each).mean_batch, 1) for each in ALLOCATORS}
    figure, (axes,) = panels(1)
    bars(axes, ALLOCATORS, {"paper, Figure 13 (2 requests/s)": PAPER_BATCH, PAGEMILL: ours})
    label(axes, "ShareGPT lengths, all requests at once", "sequences that run in a step")
    return figure, {"pagemill": ours, "paper": PAPER_BATCH}


def block_size() -> tuple[Figure, Numbers]:
    """Share of the pool that holds tokens, by block size."""
    figure, (axes,) = panels(1)
    numbers: Numbers = {}
    for color, (lengths, title) in zip((OURS, OTHER), LENGTHS.items(), strict=True):
        # Short requests are many at once, so it takes more of them to fill the pool for long.
        count = 1000 if lengths == "sharegpt" else 4000
        flags = (f"--lengths={lengths}", f"--requests={count}", "--max-num-seqs=1024")
        shares = {
            size: percent(simulate(*flags, f"--block-size={size}").utilisation_of_pool)
            for size in BLOCK_SIZES
        }
        axes.plot(range(len(BLOCK_SIZES)), list(shares.values()), "o-", color=color, label=title)
        for place, value in enumerate(shares.values()):
            axes.annotate(f"{value:.0f}", (place, value), (0, 5), **_ABOVE)
        numbers[lengths] = shares
    axes.set_xticks(range(len(BLOCK_SIZES)), [str(size) for size in BLOCK_SIZES])
    axes.set_xlabel("tokens in a block")
    axes.set_ylim(0, 109)
    label(axes, "All requests at once", "% of slots that hold a token")
    return figure, numbers


def sharing() -> tuple[Figure, Numbers]:
    """Blocks that sharing saves, by sequences and by beams of a prompt."""
    figure, both = panels(2)
    numbers: Numbers = {}
    titles = {"n": "Sequences of one prompt", "beam-width": "Beams of one prompt"}
    for axes, (kind, title) in zip(both, titles.items(), strict=True):
        ours = {
            lengths: {str(width): saved(lengths, kind, width) for width in WIDTHS}
            for lengths in LENGTHS
        }
        names = [str(width) for width in WIDTHS]
        bars(axes, names, {LENGTHS[each]: ours[each] for each in LENGTHS}, (OURS, OTHER))
        for lengths, color in zip(LENGTHS, (OURS, OTHER), strict=True):
            least, most = PAPER_SAVED[kind][lengths]
            paper = f"paper, {LENGTHS[lengths]}"
            axes.axhspan(least, most, color=color, alpha=0.15, linewidth=0, zorder=0, label=paper)
        axes.set_xlabel(f"--{kind}")
        axes.margins(y=0.45)
        label(axes, title, "% of blocks saved")
        numbers[kind] = {"pagemill": ours, "paper, least and most": PAPER_SAVED[kind]}
    return figure, numbers


def saved(lengths: str, kind: str, width: int) -> float:
    """Return the percentage of blocks that sharing saves."""
    rate = SEQUENCE_RATE[lengths] / width
    flags = (f"--lengths={lengths}", f"--{kind}={width}", f"--rate={rate}")
    # A beam's step is dear, and beams share much the same in every load.
    requests = 120 if lengths == "sharegpt" and kind == "beam-width" else 400
    return percent(simulate(*flags, f"--requests={requests}").blocks_saved_share)


def recomputed() -> tuple[Figure, Numbers]:
    """Tokens computed again after preemptions, by victim policy and size of the pool."""
    seeds = range(2)
    demand = [demanded_slots(seed) for seed in seeds]
    again: dict[str, dict[str, int]] = {"newest": {}, "cheapest": {}}
    for victim, share in ((v, s) for v in again for s in KV_SHARES):
        total = 0
        for seed, slots in zip(seeds, demand, strict=True):
            size = f"--slots={int(share * slots)}"
            flags = (*_PRESSED, f"--seed={seed}", size, f"--preemption-victim={victim}")
            total += simulate(*flags).recomputed_tokens
        again[victim][f"{share:.0%}"] = total // len(seeds)
    figure, (axes,) = panels(1)
    for color, (victim, tokens) in zip((OTHER, OURS), again.items(), strict=True):
        axes.plot([100 * share for share in KV_SHARES], list(tokens.values()), "o-", color=color)
        axes.lines[-1].set_label(victim)
    axes.set_xlim(103, 17)
    axes.set_xlabel("slots of the pool, % of those demanded")
    title = "ShareGPT lengths, 400 requests at once, 64 rows"
    label(axes, title, "tokens computed again")
    return figure, {"mean of seeds": len(seeds), **again}


_PRESSED = (
    "--lengths=sharegpt",
    "--requests=400",
    "--max-num-seqs=64",
    "--no-enable-prefix-caching",
)


def demanded_slots(seed: int) -> int:
    """Return the most slots that the load holds in a pool that never runs out."""
    options = read_options([*_PRESSED, f"--seed={seed}", "--slots=200000"])
    paged = make_paged(options, make_load(options), StepCost())
    held = [0]
    if paged.run(lambda _: held.append(paged.num_blocks_held)).preemptions:
        raise ValueError("the ample pool ran out")
    return max(held) * options.block_size


_ABOVE = {"textcoords": "offset points", "ha": "center", "fontsize": 8}


def panels(count: int) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure of one or two plots in a row."""
    figure = Figure(figsize=(5.2 * count, 3.6), layout="constrained")
    return figure, [figure.add_subplot(1, count, 1 + place) for place in range(count)]


def bars(
    axes: Axes,
    names: Sequence[str],
    series: dict[str, dict[str, float]],
    colors: Iterable[str] = (THEIRS, OURS),
) -> None:
    """Draw bars side by side, each with its value."""
    width = 0.8 / len(series)
    for place, ((title, values), color) in enumerate(zip(series.items(), colors, strict=True)):
        left = [x + (place - (len(series) - 1) / 2) * width for x in range(len(names))]
        drawn = axes.bar(left, [values[name] for name in names], width, color=color, label=title)
        axes.bar_label(drawn, fmt="%.1f", fontsize=8)
    axes.set_xticks(range(len(names)), list(names))
    axes.margins(y=0.12)


def label(axes: Axes, title: str, unit: str) -> None:
    """Say what a plot shows."""
    axes.set_title(title, fontsize=10)
    axes.set_ylabel(unit)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)


PLOTS: dict[str, Callable[[], tuple[Figure, Numbers]]] = {
    "utilisation": utilisation,
    "block_size": block_size,
    "batch": batch,
    "sharing": sharing,
    "recomputed": recomputed,
}


if __name__ == "__main__":
    main()
