"""Both papers on one model and corpus: a small study, read back.

Without arguments: the demo model on 8 of the pairs that come with the package, in less than a minute. With
``--full``, which needs a network and hours: bert-base-uncased on MNLI, as in "Telling BERT's Full Story".
"""

import sys
import tempfile

from captum_hta import open_study
from captum_hta.cli import main

SMALL = ["--limit", "8", "--probes", "4"]
FULL = [
    "--model", "bert-base-uncased", "--dataset", "nyu-mll/glue:mnli:validation_matched",
    "--max-tokens", "64", "--limit", "1000", "--sample", "0",
]  # fmt: skip
full = "--full" in sys.argv
folder = "bert-base-mnli" if full else tempfile.mkdtemp()
status = main(["study", *(FULL if full else SMALL), "--keep-contributions", "--out", folder])
assert status == 0

study = open_study(folder)
for finding in study.run["findings_of_papers"]:
    holds = {True: "holds", False: "does not hold", None: "was not measured"}[finding["holds"]]
    print(f"{finding['sentence']}: {finding['number']} ({finding['paper']}), which {holds}")

# Attention agrees with what enters a block, and less and less with the input.
correlations = study.tables["correlations"]
median = correlations.groupby(["source", "layer"])["pearson"].median()
assert median["previous_layer"].iloc[1:].min() > median["input"].iloc[1:].max()

# Hidden tokens keep less of themselves from layer to layer, and can be told all the same.
mixing = study.tables["mixing"]
assert mixing["own_median"].is_monotonic_decreasing
identified = study.tables["identifiability"].query("map == 'none' and distance == 'cosine'")
assert identified["identified"].min() > 5 * identified["chance"].max()

# Every matrix is kept for further questions: how much of [CLS] is in the last layer's own output at [CLS]?
last = [study[number]["input"][-1, :, 0, 0].mean() for number in study]
print(f"[CLS] in the last layer takes {sum(last) / len(last):.1%} from its own embedding")
