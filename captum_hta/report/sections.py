"""What the page of a study shows: its figures and tables with what to say about them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from captum_hta.report import descriptions
from captum_hta.report.figures import (
    centre_figure,
    correlation_figure,
    histogram_figure,
    pattern_figure,
)
from captum_hta.report.hidden_sections import of_hidden_tokens
from captum_hta.report.page import DASH, ERROR, Cell, Section, Shown, Table
from captum_hta.study.findings import Found
from captum_hta.study.patterns import PATTERNS, QUANTITIES
from captum_hta.study.run import SOURCES, Study, finite
from captum_hta.views.names import QUANTITY_NAMES

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

PATTERN_COLUMNS = {
    "pattern": "pattern",
    "name": "head",
    "attention": "attention",
    "input": "input contribution",
}

# --- sections with figures -------------------------------------------------------------------------


def figures(study: Study) -> list[Section]:
    """The sections that show figures: those after Figures 1 to 7 of the paper, and those of hidden tokens."""
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
                    correlation_figure(correlations, "previous_layer"),
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
                    correlation_figure(correlations, "input"),
                    descriptions.correlations(correlations, "input"),
                )
            ],
        ),
        *_of_patterns(study),
        *of_hidden_tokens(study),
    ]


def _of_positions(positions: pd.DataFrame) -> list[Shown]:
    return [
        Shown(
            "figure2_attention_positions.png",
            "Where attention lies",
            "Mean attention at each position relative to the query, for every head: what looks like a "
            "head's habit, such as the previous or the next token, is read off here.",
            histogram_figure(positions, "attention", REACH),
            descriptions.positions(positions, "attention", REACH),
        ),
        Shown(
            "figure3_input_positions.png",
            "Where the input that a head takes in lies",
            "The same for the input contribution. Since hidden tokens are mixtures of input tokens, what "
            "a head takes in can lie elsewhere than what it attends to.",
            histogram_figure(positions, "input", REACH),
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
            centre_figure(centres, ["attention"]),
            descriptions.centres(centres, ["attention"]),
        ),
        Shown(
            "figure5_centres.png",
            "Centre of mass of attention and of input contribution",
            _sentence_5(study.layer_summary()),
            centre_figure(centres, ["attention", "input"]),
            descriptions.centres(centres, ["attention", "input"]),
        ),
    ]


def _of_patterns(study: Study) -> list[Section]:
    """Heads whose attention is of a simple pattern; none where no text attends to itself."""
    if study.patterns is None or study.shown is None:
        return []
    chosen = study.patterns.chosen()
    shown = Shown(
        "figure7_patterns.png",
        "Heads of simple patterns in one text",
        "For each pattern the head whose attention is most of it, in one short text: each row is a query, "
        "each column a key. Where the last column does not show the pattern, the head takes in other input "
        "tokens than it looks at.",
        pattern_figure(study.shown),
        descriptions.patterns(chosen),
    )
    every = study.patterns.table().pivot(index=["layer", "head"], columns="pattern")
    return [
        Section(
            "Heads of simple patterns",
            "How much attention is on the previous token, the next token, the token itself and delimiters "
            "(special tokens), and how broad it is: the entropy of its rows over that of even ones. Beside "
            "it the same of the input contribution.",
            [shown],
            [
                Table.of(
                    chosen.assign(name=_head_names(chosen)),
                    "The heads that are most of each pattern",
                    "Shares of a whole of 1, means over rows; of broad heads the entropy, 1 of even rows.",
                    PATTERN_COLUMNS,
                ),
                Table.of(
                    _flat_patterns(every),
                    "Patterns of attention and input contribution by head",
                    "As above, the mean over rows ± its standard error by example.",
                    {"name": "head"} | _pattern_names(),
                    folded=True,
                ),
            ],
        )
    ]


def _flat_patterns(every: pd.DataFrame) -> pd.DataFrame:
    """A row for each head, a column for each quantity and pattern."""
    flat = pd.DataFrame(
        {
            f"{quantity} {pattern}{end}": every[f"{quantity}{end}", pattern]
            for quantity in QUANTITIES
            for pattern in PATTERNS
            for end in ("", ERROR)
        }
    ).reset_index()
    return flat.assign(name=_head_names(flat))


def _pattern_names() -> dict[str, str]:
    titles = {"attention": "attention", "input": "input contribution"}
    return {
        f"{quantity} {pattern}": f"{titles[quantity]}, {pattern}"
        for quantity in QUANTITIES
        for pattern in PATTERNS
    }


def _head_names(table: pd.DataFrame) -> list[str]:
    return [f"layer {layer}, head {head}" for layer, head in zip(table["layer"], table["head"], strict=True)]


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
    table = correlations.assign(name=_head_names(correlations))
    return [
        Table.of(
            table[table["source"] == source],
            f"Attention and {QUANTITY_NAMES[source]} by head",
            "Correlations from -1 to 1, the mean over the rows of all examples ± its standard error by "
            "example. A row is what one query attends to.",
            HEAD_COLUMNS,
            folded=True,
        )
        for source in SOURCES
    ]


# --- sentences -------------------------------------------------------------------------------------


def _sentence_1(study: Study) -> str:
    found = study.findings()
    pearson = found["share_of_heads_pearson_over_0.85"]
    spearman = found["share_of_heads_spearman_over_0.95"]
    if np.isnan(pearson) or np.isnan(spearman):
        return UNDEFINED
    return (
        f"How far a head takes in, within its own block, what it attends to: {pearson:.0%} of the heads have "
        f"a Pearson correlation above 0.85 ({PAPER}, BERT: 90%), and {spearman:.0%} a Spearman correlation "
        "above 0.95 (75%)."
    )


def _sentence_5(layers: pd.DataFrame) -> str:
    attention, inputs = layers["centre_of_mass_attention"], layers["centre_of_mass_input"]
    if len(layers) == 1:
        return (
            f"The centre of the histograms of attention lies at {attention.item():+.2f}, that of the input "
            f"contribution at {inputs.item():+.2f} (in relative positions, each weighed alike)."
        )
    return (
        f"Over the layers the centre of the histograms of attention lies between {attention.min():+.2f} and "
        f"{attention.max():+.2f}, that of the input contribution between {inputs.min():+.2f} and "
        f"{inputs.max():+.2f} (in relative positions, each weighed alike)."
    )


def _sentence_6(layers: pd.DataFrame) -> str:
    pearson, spearman = layers["pearson_input_median"], layers["spearman_input_median"]
    if pearson.isna().any() or spearman.isna().any():
        return UNDEFINED
    what = "How far attention tells what a head takes in of the input tokens: "
    if len(layers) == 1:
        return (
            f"{what}the median over heads of the Pearson correlation is {pearson.item():.2f}, that of the "
            f"Spearman correlation {spearman.item():.2f}."
        )
    lowest = layers.loc[pearson.idxmin(), "layer"]
    inside = layers["layer"].iloc[0] < lowest < layers["layer"].iloc[-1]
    return (
        f"{what}over the layers, the median Pearson correlation over heads goes from {pearson.iloc[0]:.2f} "
        f"to {pearson.iloc[-1]:.2f}"
        + (f", with its lowest, {pearson.min():.2f}, in layer {lowest:.0f}" if inside else "")
        + f"; the median Spearman correlation goes from {spearman.iloc[0]:.2f} to {spearman.iloc[-1]:.2f}."
    )


def error_sentences(study: Study) -> list[str]:
    """How far its contributions are off."""
    sentences = []
    for source, errors in study.probe_errors().items():
        name = QUANTITY_NAMES[source].capitalize() + "s"
        if np.isfinite(errors["largest"]):
            how = f"with a standard error of {errors['mean']:.4f} on average and of at most "
            sentences.append(f"{name} are estimates, {how}{errors['largest']:.4f}.")
        else:
            sentences.append(f"{name} are estimates from a single probe, whose error is not known.")
    sentences = sentences or ["All contributions are exact."]
    if study.exclude_special:
        sentences.append(
            "Special tokens are left out of all statistics but identifiability and effective attention."
        )
    return sentences


def rows_left_out(study: Study) -> dict[str, str]:
    """For each source how many rows have no correlation, of how many."""
    sums = study.correlations().groupby("source")[["rows", "rows_left_out"]].sum()
    return {
        QUANTITY_NAMES[source]: f"{sums.at[source, 'rows_left_out']} of {sums.loc[source].sum()}"
        for source in SOURCES
    }


def _sentence_of_rows(study: Study) -> str:
    told = " and ".join(f"{count} rows for the {source}" for source, count in rows_left_out(study).items())
    return (
        f"Left out are {told}, which have no correlation: rows of fewer than three tokens, and rows whose "
        "values are all the same."
    )
