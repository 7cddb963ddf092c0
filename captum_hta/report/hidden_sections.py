"""What the page of a study shows of hidden tokens, after "On Identifiability in Transformers" (Brunner et al.
2020).
"""

from __future__ import annotations

import pandas as pd

from captum_hta.report import descriptions
from captum_hta.report.figures import (
    LEARNT,
    effective_figure,
    identifiability_figure,
    neighbours_figure,
    own_share_figure,
)
from captum_hta.report.page import Section, Shown, Table
from captum_hta.study.effective import EffectiveAgreement
from captum_hta.study.identifiability import Identifiability
from captum_hta.study.mixing import by_distance
from captum_hta.study.run import Study

MIXING_COLUMNS = {
    "layer": "layer",
    "own_mean": "own share, mean",
    "own_lower_quartile": "lower quartile",
    "own_median": "median",
    "own_upper_quartile": "upper quartile",
    "own_is_largest": "own is largest",
    "own_rank": "mean rank of own",
}
EFFECTIVE_COLUMNS = {
    "layer": "layer",
    "lengths": "tokens",
    "correlation": "correlation",
    "examples": "examples",
}


def of_hidden_tokens(study: Study) -> list[Section]:
    """The sections on hidden tokens, as far as they were studied."""
    found = []
    if study.mixing is not None:
        found.append(_of_mixing(study.mixing.table()))
    if study.identifiability is not None:
        found.append(_of_identifiability(study.identifiability))
    if study.effective is not None:
        found.append(_of_effective_attention(study.effective))
    return found


def _of_mixing(mixing: pd.DataFrame) -> Section:
    """After section 5 of Brunner et al. 2020."""
    return Section(
        "Hidden tokens",
        "Contributions of input tokens to the hidden embedding after each block (Brunner et al. 2020, "
        "section 5).",
        [
            Shown(
                "figure8_own_share.png",
                "How much hidden tokens keep of themselves",
                _sentence_of_own_share(mixing),
                own_share_figure(mixing),
                descriptions.own_share(mixing),
            ),
            Shown(
                "figure9_neighbours.png",
                "From how far hidden tokens take the rest",
                "What the two tokens at each distance give together, mean over tokens that have such "
                "neighbours. The nearer the lines are to each other, the more widely context is spread.",
                neighbours_figure(mixing),
                descriptions.neighbours(mixing),
            ),
        ],
        [_mixing_table(mixing)],
    )


def _mixing_table(mixing: pd.DataFrame) -> Table:
    distances = by_distance(mixing).columns
    return Table.of(
        mixing,
        "Hidden tokens by layer",
        "Shares of a whole of 1: of a token's own input (mean, and quartiles over tokens), of the tokens for "
        "which that is the largest, and of the two tokens at each distance together. Of the ranks of a "
        "token's own input, the largest is 1. Means are ± their standard errors by example.",
        MIXING_COLUMNS | {f"at_distance_{distance}": f"{distance} away" for distance in distances},
    )


def _sentence_of_own_share(mixing: pd.DataFrame) -> str:
    first, last = mixing.iloc[0], mixing.iloc[-1]
    if len(mixing) == 1:
        return (
            f"The median share of a token's own input is {first['own_median']:.2f}; it is the largest share "
            f"for {first['own_is_largest']:.0%} of the tokens."
        )
    return (
        f"The median share of a token's own input goes from {first['own_median']:.2f} to "
        f"{last['own_median']:.2f}; it is the largest share for {first['own_is_largest']:.0%} of the tokens "
        f"at first, for {last['own_is_largest']:.0%} at last."
    )


def _of_identifiability(found: Identifiability) -> Section:
    """After section 4 of the paper."""
    table = found.table()
    training, validation, test = found.sentences
    split = f"{training} texts for training, {validation} to stop it, {test} for the test" if training else ""
    wide = table.pivot(index="layer", columns=["map", "distance"])
    columns = {f"{name} {distance}": f"{LEARNT[name]}, {distance}" for name, distance in _maps(table)}
    return Section(
        "Which hidden tokens can be told",
        "A token is identified if the input embedding nearest to its hidden embedding, among those of its "
        "own text, is its own (Brunner et al. 2020, section 4): directly, after a linear map, and after a "
        f"small multilayer perceptron (MLP) that other texts have taught. "
        f"{split or found.note.capitalize()}.",
        [
            Shown(
                "figure10_identifiability.png",
                "Hidden tokens that tell their input token",
                "Shares of the tokens of the test texts, in a band of their standard error; dashed: by "
                f"chance, {table['chance'].iloc[0]:.1%}.",
                identifiability_figure(table),
                descriptions.identifiability(table),
            )
        ],
        [
            Table.of(
                pd.DataFrame(
                    {
                        f"{name} {distance}{end}": wide[f"identified{end}", name, distance]
                        for name, distance in _maps(table)
                        for end in ("", "_error")
                    }
                ).reset_index(),
                "Identified tokens by layer",
                "Shares of a whole of 1 ± their standard error by text, for each map and each distance that "
                "neighbours are told by.",
                {"layer": "layer"} | columns,
            )
        ],
    )


def _maps(table: pd.DataFrame) -> list[tuple[str, str]]:
    """Maps and distances, in their order."""
    return list(dict.fromkeys(zip(table["map"], table["distance"], strict=True)))


def _of_effective_attention(found: EffectiveAgreement) -> Section:
    """After section 3 of the paper."""
    table = found.table()
    lengths = [f"{low} to {high}" for low, high in zip(table["shortest"], table["longest"], strict=True)]
    widths = found.width_table()
    sides = [
        f"more than {found.d_head}" if long else f"to {found.d_head}" for long in widths["longer_than_d_head"]
    ]
    long = found.by_width.counts[:, 1].any()
    return Section(
        "Effective attention",
        "Of a text with more tokens than a head is wide, part of the attention has no effect on what the "
        "head says; what is left is effective attention (Brunner et al. 2020, section 3). "
        + ("" if long else "No text here is as long, so all attention is effective."),
        [
            Shown(
                "figure11_effective_attention.png",
                "Attention and effective attention by the length of texts",
                f"Correlation of the entries of both matrices of a head, mean over heads. Up to "
                f"{found.d_head} tokens, the width of a head, both are the same.",
                effective_figure(table, found.d_head),
                descriptions.effective(table, found.d_head),
            )
        ],
        [
            Table.of(
                widths.assign(lengths=sides),
                "Attention and effective attention up to the width of a head and beyond",
                "Pearson's correlation, the mean over heads and texts ± its standard error by text.",
                EFFECTIVE_COLUMNS,
            ),
            Table.of(
                table.assign(lengths=lengths),
                "Attention and effective attention by layer and length",
                "As above.",
                EFFECTIVE_COLUMNS,
                folded=True,
            ),
        ],
    )
