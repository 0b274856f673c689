"""Figures of an analysis: colours a colour-blind reader can tell apart, sizes that fit a column, PNG or PDF by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
"""Okabe and Ito's palette."""

MARKERS = "osD^vP*"
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.grid": False,
    "legend.fontsize": 8,
    "savefig.dpi": 200,
}


def save_figure(target: str | Path, size: tuple[float, float], draw: Callable[[Any], None]) -> Path:
    """Calls `draw` with an empty figure of `size` inches and writes it; returns the file."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        figure.savefig(target)
    return target


def plot_layers(
    curves: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]],
    measure: str,
    target: str | Path,
    *,
    score_layer: int | None = None,
    best: int | None = None,
) -> Path:
    """A measure over layers: name -> (mean, low, high), float [L] each; the band is the interval of the mean."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for index, (name, (mean, low, high)) in enumerate(curves.items()):
            colour = COLOURS[index % len(COLOURS)]
            layers = np.arange(len(mean))
            if len(curves) < 4:
                axes.fill_between(layers, low, high, color=colour, alpha=0.18, linewidth=0)
            axes.plot(layers, mean, marker=MARKERS[index % len(MARKERS)], markersize=3.5, color=colour, label=name)
        for layer, style, label in ((score_layer, "--", "score layer"), (best, ":", "layer found")):
            if layer is not None and (label == "score layer" or layer != score_layer):
                axes.axvline(layer, color="0.35", linestyle=style, linewidth=1, label=f"{label} ({layer})")
        axes.set(xlabel="layer (0-based)", ylabel=measure, ylim=(0, 1))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend(loc="best", framealpha=0.9)

    return save_figure(target, (6, 3.4), draw)


def plot_tokens(
    means: Float[np.ndarray, "L S"],
    labels: Sequence[str],
    measure: str,
    target: str | Path,
    *,
    marks: Mapping[str, Sequence[tuple[int, int]]] | None = None,
) -> Path:
    """A measure of each token alone (rows) at each layer (columns); `marks`: what -> (layer, token) cells."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        image = axes.imshow(means.T, aspect="auto", cmap="viridis", interpolation="nearest")
        for index, (name, cells) in enumerate((marks or {}).items()):
            if cells:
                where = np.asarray(cells)
                axes.scatter(
                    *(where[:, 0], where[:, 1]),
                    marker="Xo"[index % 2],
                    facecolors="white",
                    edgecolors="black",
                    s=46,
                    label=name,
                )
        axes.set(xlabel="layer (0-based)", ylabel="token of the suffix", yticks=range(len(labels)))
        axes.set_yticklabels(labels, fontsize=max(4, min(8, 260 / max(len(labels), 1))))
        axes.xaxis.get_major_locator().set_params(integer=True)
        figure.colorbar(image, ax=axes, label=measure, shrink=0.8)
        if any((marks or {}).values()):
            figure.legend(loc="outside upper right", ncols=2)

    return save_figure(target, (6.5, min(9.5, 1.6 + 0.14 * len(labels))), draw)


def plot_shares(shares: Float[np.ndarray, "L 3"], target: str | Path, *, title: str = "") -> Path:
    """Where the attention of documents' tokens goes, per layer: prefix, own document, other documents, stacked."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        layers = np.arange(len(shares))
        names = ("prefix", "own document", "other documents")
        bottom = np.zeros(len(shares))
        for name, colour, hatch, values in zip(names, COLOURS, ("", "//", ".."), shares.T, strict=False):
            axes.bar(
                layers, values, 0.9, bottom, color=colour, label=name, hatch=hatch, edgecolor="white", linewidth=0.3
            )
            bottom += values
        axes.set(xlabel="layer (0-based)", ylabel="share of documents' attention", ylim=(0, 1), title=title)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.margins(x=0.01)
        figure.legend(loc="outside upper center", ncols=3, frameon=False)

    return save_figure(target, (6, 3.4), draw)


def plot_parts(weights: Float[np.ndarray, "C C"], target: str | Path, *, title: str = "") -> Path:
    """Mean attention from the tokens of each part (rows) to each part (columns), on a logarithmic colour scale.

    What a part does not see is white.
    """

    def draw(figure: Any) -> None:
        from matplotlib.colors import LogNorm

        axes = figure.subplots()
        seen = np.ma.masked_less_equal(weights, 0.0)
        norm = LogNorm(max(float(seen.min()), 1e-5), 1.0, clip=True)
        image = axes.imshow(seen, aspect="auto", cmap="cividis", norm=norm, interpolation="nearest")
        figure.colorbar(image, ax=axes, label="share of attention", shrink=0.8)
        names = ["prefix", *(f"doc {i}" for i in range(1, len(weights) - 1)), "suffix"]
        axes.set(xlabel="attended part", ylabel="attending part", title=title)
        ticks = _some(len(names))
        axes.set_xticks(ticks, [names[i] for i in ticks], rotation=90)
        axes.set_yticks(ticks, [names[i] for i in ticks])

    return save_figure(target, (5, 4.4), draw)


def plot_suffix(
    masses: Float[np.ndarray, "Q N"],
    tokens: Sequence[str],
    target: str | Path,
    *,
    relevant: Sequence[int] = (),
    title: str = "",
) -> Path:
    """The mass each suffix token (rows) puts on each document; documents in `relevant` (0-based) are starred."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        image = axes.imshow(masses, aspect="auto", cmap="viridis", vmin=0, interpolation="nearest")
        figure.colorbar(image, ax=axes, label="share of the attention on documents", shrink=0.8)
        ticks = sorted({*_some(masses.shape[1]), *relevant})
        axes.set_xticks(ticks, [f"{i + 1} ★" if i in relevant else f"{i + 1}" for i in ticks], rotation=90)
        axes.set(xlabel="document (★: relevant)", ylabel="token of the suffix", yticks=range(len(tokens)), title=title)
        axes.set_yticklabels(tokens, fontsize=max(4, min(8, 260 / max(len(tokens), 1))))

    return save_figure(target, (6, min(9.5, 2 + 0.14 * len(tokens))), draw)


def plot_decomposition(steps: Sequence[tuple[str, float, float]], target: str | Path, *, title: str = "") -> Path:
    """Seconds of each system of a speed-up's decomposition: (change, seconds, factor over the one before)."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        places = np.arange(len(steps))[::-1]
        seconds = [step[1] for step in steps]
        axes.barh(places, seconds, color=COLOURS[0], height=0.65)
        for place, (_, time, factor) in zip(places, steps, strict=True):
            text = f" {time:.3g} s" if place == places[0] else f" {time:.3g} s (× {factor:.2f})"
            axes.text(time, place, text, va="center", fontsize=8)
        axes.set(xlabel="median seconds a list", title=title, xlim=(0, max(seconds) * 1.25))
        axes.set_yticks(places, [step[0] for step in steps])
        axes.spines[["top", "right"]].set_visible(False)

    return save_figure(target, (6.8, 0.9 + 0.42 * len(steps)), draw)


def plot_scaling(curves: Mapping[str, tuple[Sequence[int], Sequence[float]]], target: str | Path) -> Path:
    """Median latency over the number of candidates, both logarithmic: system -> (candidates, seconds)."""

    def draw(figure: Any) -> None:
        from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

        axes = figure.subplots()
        for index, (name, (candidates, seconds)) in enumerate(curves.items()):
            style = {"marker": MARKERS[index % len(MARKERS)], "color": COLOURS[index % len(COLOURS)], "markersize": 4}
            axes.plot(candidates, seconds, label=name, **style)
        axes.set(xscale="log", yscale="log", xlabel="candidates N", ylabel="median seconds a list")
        axes.xaxis.set_major_locator(FixedLocator(sorted({n for found, _ in curves.values() for n in found})))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.grid(alpha=0.3)
        axes.legend()

    return save_figure(target, (6, 3.8), draw)


def plot_queries(values: Mapping[str, np.ndarray], measure: str, target: str | Path) -> Path:
    """Each system's per-query values, sorted: how many queries fail, how many are perfect."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for index, (name, found) in enumerate(values.items()):
            ordered = np.sort(found)
            share = np.arange(len(found) + 1) / max(len(found), 1)
            axes.step(
                share,
                np.concatenate([ordered[:1], ordered]),
                where="pre",
                color=COLOURS[index % len(COLOURS)],
                label=name,
            )
        axes.set(xlabel="share of queries", ylabel=measure, xlim=(0, 1), ylim=(-0.02, 1.02))
        axes.grid(alpha=0.3)
        axes.legend()

    return save_figure(target, (6, 3.4), draw)


def _some(count: int, most: int = 26) -> list[int]:
    """The first, the last, and evenly many of those between."""
    step = max(1, -(-count // most))
    return sorted({0, *range(1, count - 1, step), count - 1})
