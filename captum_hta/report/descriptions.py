"""What the figures of a study show, in words and numbers, for those who do not see them."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from captum_hta.study.mixing import by_distance
from captum_hta.views.names import QUANTITY_NAMES

NEAR = {0: "the token itself", -1: "the token before", 1: "the token after"}


def correlations(table: pd.DataFrame, source: str) -> str:
    """Of :func:`captum_hta.report.figures.correlation_figure`."""
    table = table[table["source"] == source]
    medians = table.groupby("layer")[["pearson", "spearman"]].median()
    return (
        f"Two panels of box plots over the layers, with a point for each of {table['head'].nunique()} heads: "
        f"how attention correlates with the {QUANTITY_NAMES[source]}. The median of Pearson's correlation "
        f"{_course(medians['pearson'])}; that of Spearman's {_course(medians['spearman'])}."
    )


def positions(table: pd.DataFrame, quantity: str, reach: int) -> str:
    """Of :func:`captum_hta.report.figures.histogram_figure`."""
    table = table[(table["quantity"] == quantity) & (table["offset"].abs() <= reach)]
    highest = table.loc[table.groupby(["layer", "head"])["value"].idxmax(), "offset"]
    near = ", ".join(f"{words} in {(highest == offset).sum()}" for offset, words in NEAR.items())
    return (
        f"A grid of small histograms, {table['layer'].nunique()} layers by {table['head'].nunique()} heads: "
        f"mean {QUANTITY_NAMES[quantity]} by position of the key relative to the query. The highest bar "
        f"is at {near} and elsewhere in {(~highest.isin(list(NEAR))).sum()} of {len(highest)}."
    )


def centres(table: pd.DataFrame, quantities: Sequence[str]) -> str:
    """Of :func:`captum_hta.report.figures.centre_figure`."""
    sentences = []
    for quantity in quantities:
        heads = table.loc[table["quantity"] == quantity, ["layer", "centre_of_mass"]].set_index("layer")
        heads = heads["centre_of_mass"]
        sentences.append(
            f"That of {QUANTITY_NAMES[quantity]} {_course(heads.groupby('layer').mean())}; that of single "
            f"heads lies between {heads.min():.2f} and {heads.max():.2f}."
        )
    return " ".join(
        ["A line of mean centres of mass over the layers, and a point for each head.", *sentences]
    )


def centres_together(table: pd.DataFrame, quantity: str) -> str:
    """Of :func:`captum_hta.report.figures.centres_together_figure`."""
    table = table[table["quantity"] == quantity]
    lines = [
        f"that of {label} {_course(heads.groupby('layer')['centre_of_mass'].mean())}"
        for label, heads in table.groupby("label", sort=False)
    ]
    return (
        f"A line over the layers for each of {len(lines)} studies, the mean centre of mass of "
        f"{QUANTITY_NAMES[quantity]}: {'; '.join(lines)}."
    )


def own_share(mixing: pd.DataFrame) -> str:
    """Of :func:`captum_hta.report.figures.own_share_figure`."""
    table = mixing.set_index("layer")
    return (
        "Two panels with a line over the layers. The median share of a token's own input "
        f"{_course(table['own_median'])}; the share of tokens for which it is the largest "
        f"{_course(table['own_is_largest'])}."
    )


def neighbours(mixing: pd.DataFrame) -> str:
    """Of :func:`captum_hta.report.figures.neighbours_figure`."""
    given = by_distance(mixing.set_index("layer")).dropna(axis=1, how="all")
    if given.empty:
        return "A plot without lines over the layers, since no text has a token with neighbours."
    ends = dict.fromkeys([given.columns[0], given.columns[-1]])
    told = [f"at distance {distance} it {_course(given[distance])}" for distance in ends]
    return (
        f"A line over the layers for each of {given.shape[1]} distances: what the two tokens there give "
        f"together; {'; '.join(told)}."
    )


def patterns(chosen: pd.DataFrame) -> str:
    """Of :func:`captum_hta.report.figures.pattern_figure`."""
    heads = "; ".join(
        f"{pattern}, layer {layer}, head {head}: {attention:.2f} of the attention, {given:.2f} of the input "
        "contribution"
        for pattern, layer, head, attention, given in chosen.itertuples(index=False)
    )
    return (
        "Heat maps of one text, a row of them for each pattern: attention, previous-layer contribution and "
        f"input contribution of the head that is most of it. Over all texts: {heads}."
    )


def identifiability(table: pd.DataFrame) -> str:
    """Of :func:`captum_hta.report.figures.identifiability_figure`."""
    known = table.dropna(subset="identified")
    lines = "; ".join(
        f"{name} and {distance} distance: it {_course(rows.set_index('layer')['identified'])}"
        for (name, distance), rows in known.groupby(["map", "distance"], sort=False)
    )
    return (
        "A panel for each distance with a line over the layers for each map: the share of hidden tokens "
        f"whose own input embedding is the nearest. With map {lines}."
    )


def effective(table: pd.DataFrame, d_head: int) -> str:
    """Of :func:`captum_hta.report.figures.effective_figure`."""
    longest = table[table["shortest"] == table["shortest"].max()].set_index("layer")["correlation"]
    tokens = f"{table['shortest'].max()} to {table['longest'].max()}"
    return (
        "A line for each layer over the number of tokens: how attention correlates with effective attention. "
        f"A dashed line marks the width of a head, {d_head}. Of texts of {tokens} tokens the correlation "
        f"{_course(longest)}."
    )


def _course(values: pd.Series) -> str:
    """How numbers go over the layers, which are their index."""
    known = values.dropna()
    if known.empty:
        return "is not defined in any layer"
    if len(known) == 1:
        return f"is {known.iloc[0]:.2f} in layer {known.index[0]}"
    return (
        f"goes from {known.iloc[0]:.2f} in layer {known.index[0]} to {known.iloc[-1]:.2f} in layer "
        f"{known.index[-1]}, between {known.min():.2f} and {known.max():.2f}"
    )
