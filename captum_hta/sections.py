"""What the page of a study shows: its figures and tables with what to say about them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from captum_hta import descriptions, plots
from captum_hta.page import DASH, Cell, Section, Shown, Table
from captum_hta.paper import Found
from captum_hta.study import SOURCES, Study, finite

PAPER = "Pascual et al. 2021"
UNDEFINED = "The texts are too short, or attention too even, for a correlation in every layer."
REACH = 16
"""Relative positions that histograms show to each side."""
LAYER_COLUMNS = {
    "layer": "layer",
    "pearson_previous_layer_median": "previous layer, Pearson",
    "spearman_previous_layer_median": "previous layer, Spearman",
    "pearson_input_median": "input, Pearson",
    "spearman_input_median": "input, Spearman",
    "centre_of_mass_attention": "centre of attention",
    "centre_of_mass_input": "centre of input contribution",
}
HEAD_COLUMNS = {
    "name": "head",
    "pearson": "Pearson",
    "spearman": "Spearman",
    "rows": "rows",
    "rows_left_out": "rows left out",
    "examples": "examples",
}
MIXING_COLUMNS = {
    "layer": "layer",
    "own_mean": "own share, mean",
    "own_lower_quartile": "lower quartile",
    "own_median": "median",
    "own_upper_quartile": "upper quartile",
    "own_is_largest": "own is largest",
    "own_rank": "mean rank of own",
}

# --- sections with figures -------------------------------------------------------------------------


def figures(study: Study) -> list[Section]:
    """The sections that show figures: those after the papers' Figures 1 to 6, and those of hidden tokens."""
    correlations, positions = study.correlations(), study.relative_positions()
    return [
        Section(
            "Within a block",
            "Whether attention tells what a head takes in of the hidden tokens that enter its own block.",
            [
                Shown(
                    "figure1_attention_and_previous_layer.png",
                    "Attention and previous-layer contribution",
                    _sentence_1(study),
                    plots.correlation_figure(correlations, "previous_layer"),
                    descriptions.correlations(correlations, "previous_layer"),
                )
            ],
        ),
        Section(
            "Where attention and contributions lie",
            "Positions are relative to the query: -1 is the token before it.",
            [*_of_positions(positions), *_of_centres(study)],
        ),
        Section(
            "From the input",
            "Whether attention tells what a head takes in of the input tokens, through all blocks below it.",
            [
                Shown(
                    "figure6_attention_and_input.png",
                    "Attention and input contribution",
                    _sentence_6(study.layer_summary()),
                    plots.correlation_figure(correlations, "input"),
                    descriptions.correlations(correlations, "input"),
                )
            ],
        ),
        *([] if study.mixing is None else [_of_hidden_tokens(study.mixing.table())]),
    ]


def _of_positions(positions: pd.DataFrame) -> list[Shown]:
    return [
        Shown(
            "figure2_attention_positions.png",
            "Where attention lies",
            "Mean attention at each position relative to the query, for every head: what looks like a "
            "head's habit, such as the previous or the next token, is read off here.",
            plots.histogram_figure(positions, "attention", REACH),
            descriptions.positions(positions, "attention", REACH),
        ),
        Shown(
            "figure3_input_positions.png",
            "Where the input that a head takes in lies",
            "The same for the input contribution. Since hidden tokens are mixtures of input tokens, what "
            "a head takes in can lie elsewhere than what it attends to.",
            plots.histogram_figure(positions, "input", REACH),
            descriptions.positions(positions, "input", REACH),
        ),
    ]


def _of_centres(study: Study) -> list[Shown]:
    centres = study.centres_of_mass()
    return [
        Shown(
            "figure4_attention_centre.png",
            "Centre of mass of attention",
            "Centre of mass of the histograms of Figure 2 per layer (line: mean over heads; points: heads). "
            "Below zero a head looks back, above zero ahead. Each position counts by its mean attention, as "
            "in the paper, however seldom texts are long enough for it: so this is not the mean distance "
            "that attention spans.",
            plots.centre_figure(centres, ["attention"]),
            descriptions.centres(centres, ["attention"]),
        ),
        Shown(
            "figure5_centres.png",
            "Centre of mass of attention and of input contribution",
            _sentence_5(study.layer_summary()),
            plots.centre_figure(centres, ["attention", "input"]),
            descriptions.centres(centres, ["attention", "input"]),
        ),
    ]


def _of_hidden_tokens(mixing: pd.DataFrame) -> Section:
    """After section 5 of Brunner et al. 2020."""
    first, last = mixing.iloc[0], mixing.iloc[-1]
    return Section(
        "Hidden tokens",
        "Contributions of input tokens to the hidden embedding after each block (Brunner et al. 2020, "
        "section 5).",
        [
            Shown(
                "figure7_own_share.png",
                "How much hidden tokens keep of themselves",
                f"The median share of a token's own input goes from {first['own_median']:.2f} to "
                f"{last['own_median']:.2f}; it is the largest share for {first['own_is_largest']:.0%} of the "
                f"tokens at first, for {last['own_is_largest']:.0%} at last.",
                plots.own_share_figure(mixing),
                descriptions.own_share(mixing),
            ),
            Shown(
                "figure8_neighbours.png",
                "From how far hidden tokens take the rest",
                "What the two tokens at each distance give together, mean over tokens that have such "
                "neighbours. The nearer the lines are to each other, the more widely context is spread.",
                plots.neighbours_figure(mixing),
                descriptions.neighbours(mixing),
            ),
        ],
        [_mixing_table(mixing)],
    )


# --- sections with tables --------------------------------------------------------------------------


def beside_the_paper(found: Sequence[Found]) -> Section:
    """The section with the findings of the papers."""
    verdicts = [one.verdict for one in found]
    return Section(
        "Beside the paper",
        f"Of {len(found)} findings of the papers {verdicts.count('yes')} hold here and "
        f"{verdicts.count('no')} do not; {verdicts.count('not measured')} were not measured. "
        "What the papers report of BERT-base, 12 layers of 12 heads, next to the same number of this run. "
        "Where they speak of some of the twelve layers, layers of the same relative depth are meant here. A "
        "head's correlation is its mean over rows.",
        tables=[
            Table(
                "Findings of the papers",
                "A finding holds here if this run's number lies to the bound as is said; “not measured” are "
                "findings about layers that were not studied, or about numbers that are not defined.",
                ["finding", "holds here", "this run", "in the paper", "holds if", "source"],
                [_finding_row(one) for one in found],
            )
        ],
    )


def _finding_row(one: Found) -> list[Cell]:
    finding = one.finding
    number, bound = (
        DASH if np.isnan(value) else format(value, finding.form) for value in (one.number, one.bound)
    )
    return [
        Cell(finding.sentence),
        Cell(one.verdict),
        Cell(number, finite(one.number)),
        Cell(finding.paper),
        Cell(f"{finding.relation} {bound}"),
        Cell(finding.source),
    ]


def numbers(study: Study) -> list[Section]:
    """The sections with a row for each layer and for each head."""
    return [
        Section("By layer", tables=[_layer_table(study.layer_summary())]),
        Section("By head", _sentence_of_rows(study), tables=_head_tables(study.correlations())),
    ]


def _layer_table(layers: pd.DataFrame) -> Table:
    return Table.of(
        layers,
        "Correlations and centres of mass by layer",
        "Correlations of attention with both contributions, from -1 to 1: medians over the heads of a layer. "
        "Centres of mass are in tokens, means over its heads: below zero they lie before the query.",
        LAYER_COLUMNS,
    )


def _head_tables(correlations: pd.DataFrame) -> list[Table]:
    """A table for each source."""
    names = [
        f"layer {layer}, head {head}"
        for layer, head in zip(correlations["layer"], correlations["head"], strict=True)
    ]
    table = correlations.assign(name=names)
    return [
        Table.of(
            table[table["source"] == source],
            f"Attention and {plots.MAPS[source]} by head",
            "Correlations from -1 to 1, the mean over the rows of all examples ± its standard error by "
            "example. A row is what one query attends to.",
            HEAD_COLUMNS,
            folded=True,
        )
        for source in SOURCES
    ]


def _mixing_table(mixing: pd.DataFrame) -> Table:
    distances = [name for name in mixing if name.startswith("at_distance_")]
    return Table.of(
        mixing.rename(columns={"own_error": "own_mean_error"}),
        "Hidden tokens by layer",
        "Shares of a whole of 1: of a token's own input (mean ± its standard error by example, quartiles "
        "over tokens), of the tokens for which that is the largest, and of the two tokens at each distance "
        "together. Of the ranks of a token's own input, the largest is 1.",
        MIXING_COLUMNS | {name: f"{name.removeprefix('at_distance_')} away" for name in distances},
    )


# --- sentences -------------------------------------------------------------------------------------


def _sentence_1(study: Study) -> str:
    found = study.findings()
    pearson = found["share_of_heads_pearson_over_0.85"]
    spearman = found["share_of_heads_spearman_over_0.95"]
    if np.isnan(pearson) or np.isnan(spearman):
        return UNDEFINED
    return (
        f"Within its own block a head takes in roughly what it attends to: {pearson:.0%} of the heads "
        f"have a Pearson correlation above 0.85 ({PAPER}, BERT: 90%), and {spearman:.0%} a Spearman "
        "correlation above 0.95 (75%)."
    )


def _sentence_5(layers: pd.DataFrame) -> str:
    attention, inputs = layers["centre_of_mass_attention"], layers["centre_of_mass_input"]
    return (
        f"Over the layers the centre of the histograms of attention lies between {attention.min():+.2f} and "
        f"{attention.max():+.2f}, that of the input contribution between {inputs.min():+.2f} and "
        f"{inputs.max():+.2f} (in relative positions, each weighed alike)."
    )


def _sentence_6(layers: pd.DataFrame) -> str:
    pearson, spearman = layers["pearson_input_median"], layers["spearman_input_median"]
    if pearson.isna().any() or spearman.isna().any():
        return UNDEFINED
    lowest = layers.loc[pearson.idxmin(), "layer"]
    return (
        "How far attention tells what a head takes in of the input tokens: over the layers, the median "
        f"Pearson correlation over heads goes from {pearson.iloc[0]:.2f} to {pearson.iloc[-1]:.2f}, with "
        f"its lowest, {pearson.min():.2f}, in layer {lowest:.0f}; the median Spearman correlation goes "
        f"from {spearman.iloc[0]:.2f} to {spearman.iloc[-1]:.2f}."
    )


def error_sentences(study: Study) -> list[str]:
    """How far its contributions are off."""
    sentences = []
    for source, errors in study.probe_errors().items():
        name = plots.MAPS[source].capitalize() + "s"
        if np.isfinite(errors["largest"]):
            how = f"with a standard error of {errors['mean']:.4f} on average and of at most "
            sentences.append(f"{name} are estimates, {how}{errors['largest']:.4f}.")
        else:
            sentences.append(f"{name} are estimates from a single probe, whose error is not known.")
    return sentences or ["All contributions are exact."]


def rows_left_out(study: Study) -> dict[str, str]:
    """For each source how many rows have no correlation, of how many."""
    sums = study.correlations().groupby("source")[["rows", "rows_left_out"]].sum()
    return {
        plots.MAPS[source]: f"{sums.at[source, 'rows_left_out']} of {sums.loc[source].sum()}"
        for source in SOURCES
    }


def _sentence_of_rows(study: Study) -> str:
    told = " and ".join(f"{count} rows for the {source}" for source, count in rows_left_out(study).items())
    return (
        f"Left out are {told}, which have no correlation: rows of fewer than three tokens, and rows whose "
        "values are all the same."
    )
