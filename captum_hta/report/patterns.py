"""Heads with simple patterns: Figure 7 of Pascual et al. 2021."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from captum_hta.model.head_names import head_name
from captum_hta.report.over_layers import head_names
from captum_hta.report.page import ERROR, CaptionedFigure, Section, Table
from captum_hta.study.patterns import PATTERNS, QUANTITIES, PatternExample, Patterns
from captum_hta.study.run import Study
from captum_hta.views.heatmaps import heatmaps
from captum_hta.views.names import QUANTITY_NAMES

CHOSEN_COLUMNS = {
    "pattern": "pattern",
    "name": "head",
    "attention": "attention",
    "input": "input contribution",
}
HEAD_COLUMNS = {"name": "head"} | {
    f"{quantity} {pattern}": f"{QUANTITY_NAMES[quantity]}, {pattern}"
    for quantity in QUANTITIES
    for pattern in PATTERNS
}


def simple_patterns(study: Study) -> Section | None:
    """The section; ``None`` if no head has a pattern, or texts do not attend to themselves."""
    analysis = study.find(Patterns)
    if analysis is None or analysis.example is None:
        return None
    return Section(
        "Heads with simple patterns",
        "The share of attention on the previous token, the next token, the token itself and delimiters "
        "(special tokens), and how broad attention is: the entropy of its rows divided by that of even rows. "
        "The same is shown for the input contribution.",
        [
            CaptionedFigure(
                "figure7_patterns.png",
                "Heads with simple patterns in one text",
                "For each pattern, the head whose attention follows it most, in one short text: each row is "
                "a query, each column a key. Where the last heatmap does not show the pattern, the head "
                "takes its input from other tokens than those that it attends to.",
                pattern_figure(analysis.example),
                _alt(analysis.chosen()),
            )
        ],
        [_chosen_table(analysis.chosen()), _head_table(analysis.table())],
    )


def _chosen_table(chosen: pd.DataFrame) -> Table:
    return Table.of(
        chosen.assign(name=head_names(chosen)),
        "The head that follows each pattern most",
        "Shares between 0 and 1, means over rows; for broad heads the entropy, which is 1 for even rows.",
        CHOSEN_COLUMNS,
    )


def _head_table(table: pd.DataFrame) -> Table:
    """A row for each head, with a column for each quantity and pattern."""
    wide = table.pivot(index=["layer", "head"], columns="pattern")
    flat = pd.DataFrame(
        {
            f"{quantity} {pattern}{end}": wide[f"{quantity}{end}", pattern]
            for quantity in QUANTITIES
            for pattern in PATTERNS
            for end in ("", ERROR)
        }
    ).reset_index()
    return Table.of(
        flat.assign(name=head_names(flat)),
        "Patterns of attention and input contribution by head",
        "As above, means over rows ± standard errors by example.",
        HEAD_COLUMNS,
        folded=True,
    )


def _alt(chosen: pd.DataFrame) -> str:
    heads = "; ".join(
        f"{pattern}, {head_name(layer, head)}: {attention:.2f} of the attention, {given:.2f} of the input "
        "contribution"
        for pattern, layer, head, attention, given in chosen.itertuples(index=False)
    )
    return (
        "Heatmaps of one text, a row of them for each pattern: attention, previous-layer contribution and "
        f"input contribution of the head that follows it most. Over all texts: {heads}."
    )


def pattern_figure(example: PatternExample) -> Figure:
    """For each pattern a head whose attention follows it, with its contributions, in one text."""
    return heatmaps(example.maps, example.tokens, example.titles)
