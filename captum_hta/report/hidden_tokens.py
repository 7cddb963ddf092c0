"""How input tokens are mixed in hidden tokens, after section 5 of Brunner et al. 2020."""

from __future__ import annotations

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from captum_hta.report.over_layers import course, draw_grid, draw_layer_axis, width
from captum_hta.report.page import CaptionedFigure, Section, Table
from captum_hta.study.hidden_tokens import Mixing, by_distance
from captum_hta.study.run import Study
from captum_hta.views.style import INPUT, STYLE, shades

COLUMNS = {
    "layer": "layer",
    "own_mean": "own share, mean",
    "own_lower_quartile": "lower quartile",
    "own_median": "median",
    "own_upper_quartile": "upper quartile",
    "own_is_largest": "own is largest",
    "own_rank": "mean rank of own",
}

# --- section ---------------------------------------------------------------------------------------


def hidden_tokens(study: Study) -> Section | None:
    """The section; ``None`` if mixing was not measured."""
    analysis = study.find(Mixing)
    if analysis is None:
        return None
    table = analysis.table()
    return Section(
        "Hidden tokens",
        "Contributions of input tokens to the hidden embedding after each block (Brunner et al. 2020, "
        "section 5).",
        [
            CaptionedFigure(
                "figure8_own_share.png",
                "Share of a token's own input in its hidden token",
                _own_share_caption(table),
                own_share_figure(table),
                _own_share_alt(table),
            ),
            CaptionedFigure(
                "figure9_neighbours.png",
                "Contributions of neighbours to hidden tokens",
                "What the two tokens at each distance contribute together, mean over tokens that have such "
                "neighbours. The closer the lines are to each other, the more widely context is spread.",
                neighbours_figure(table),
                _neighbours_alt(table),
            ),
        ],
        [_table(table)],
    )


def _table(table: pd.DataFrame) -> Table:
    distances = by_distance(table).columns
    return Table.of(
        table,
        "Hidden tokens by layer",
        "Shares between 0 and 1: of a token's own input (mean, and quartiles over tokens), of the tokens for "
        "which the own input has the largest share, and of the two tokens at each distance together. The "
        "largest share has rank 1. Means are ± their standard errors by example.",
        COLUMNS | {f"at_distance_{distance}": f"{distance} away" for distance in distances},
    )


# --- caption and alternative text ------------------------------------------------------------------


def _own_share_caption(table: pd.DataFrame) -> str:
    first, last = table.iloc[0], table.iloc[-1]
    if len(table) == 1:
        return (
            f"The median share of a token's own input is {first['own_median']:.2f}; it is the largest share "
            f"for {first['own_is_largest']:.0%} of the tokens."
        )
    return (
        f"The median share of a token's own input goes from {first['own_median']:.2f} to "
        f"{last['own_median']:.2f}; it is the largest share for {first['own_is_largest']:.0%} of the tokens "
        f"in the first layer and for {last['own_is_largest']:.0%} in the last."
    )


def _own_share_alt(table: pd.DataFrame) -> str:
    layers = table.set_index("layer")
    return (
        "Two panels with a line over the layers. The median share of a token's own input "
        f"{course(layers['own_median'])}; the share of tokens for which it is the largest "
        f"{course(layers['own_is_largest'])}."
    )


def _neighbours_alt(table: pd.DataFrame) -> str:
    shares = by_distance(table.set_index("layer")).dropna(axis=1, how="all")
    if shares.empty:
        return "A plot without lines over the layers, since no text has a token with neighbours."
    ends = dict.fromkeys([shares.columns[0], shares.columns[-1]])
    courses = [f"at distance {distance} it {course(shares[distance])}" for distance in ends]
    return (
        f"A line over the layers for each of {shares.shape[1]} distances: what the two tokens there "
        f"contribute together; {'; '.join(courses)}."
    )


# --- figures ---------------------------------------------------------------------------------------


def own_share_figure(mixing: pd.DataFrame) -> Figure:
    """The share of a token's own input in its hidden embeddings, median and quartiles, and how often it is
    the largest share.

    Args:
        mixing: As :meth:`captum_hta.study.hidden_tokens.Mixing.table` returns.
    """
    layers = sorted(mixing["layer"])
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width(layers), 3.2), layout="constrained")
        share, largest = figure.subplots(1, 2)
        share.fill_between(
            mixing["layer"], mixing["own_lower_quartile"], mixing["own_upper_quartile"],
            color=INPUT, alpha=0.25, linewidth=0, label="quartiles",
        )  # fmt: skip
        share.plot(mixing["layer"], mixing["own_median"], color=INPUT, marker="o", label="median")
        share.set_title("share of the own input")
        share.legend(frameon=False)
        largest.plot(mixing["layer"], mixing["own_is_largest"], color=INPUT, marker="o")
        largest.set_title("own input has the largest share")
        for axis in (share, largest):
            axis.set_ylim(0, 1.02)
            draw_grid(axis)
            draw_layer_axis(axis, layers, ticks=12)
    return figure


def neighbours_figure(mixing: pd.DataFrame) -> Figure:
    """What the tokens at each distance contribute to a hidden token together.

    Args:
        mixing: As :meth:`captum_hta.study.hidden_tokens.Mixing.table` returns.
    """
    layers = sorted(mixing["layer"])
    shares = by_distance(mixing).dropna(axis=1, how="all")
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width(layers), 3.4), layout="constrained")
        axis = figure.subplots()
        for (distance, values), shade in zip(shares.items(), shades(shares.shape[1]), strict=False):
            axis.plot(mixing["layer"], values, color=shade, marker="o", markersize=3, label=str(distance))
        axis.set_ylim(0)
        axis.set_ylabel("contribution of both\ntokens at a distance")
        draw_grid(axis)
        draw_layer_axis(axis, layers)
        if shares.shape[1]:
            figure.legend(title="distance", loc="outside right center", frameon=False)
    return figure
