"""Contributions and other methods: how far they agree, and which ranks tokens as heads respond to changes."""

from captum_hta import compare, contributions, faithfulness, load_model
from captum_hta.baselines import AttentionRollout, AttentionWeights, ValueWeightedNorm
from captum_hta.evaluation import HtaMethod, Noise, ZeroVector

model = load_model()
texts = [("The trophy did not fit in the suitcase.", "It was too big."), "Dogs bark at night."]
total = contributions(model, texts, source="input", n_probes=16)
baselines = [AttentionWeights(model), ValueWeightedNorm(model), AttentionRollout(model)]
table = compare(total, {method.name: method.attribute(texts) for method in baselines})
print(table.groupby(["method", "layer"])["spearman"].mean().unstack("layer").round(2))

# Change each source token in turn, measure how far each head moves, and rank the methods by it.
methods = [HtaMethod(model, "input", n_probes=16), *baselines]
found = faithfulness(model, texts, methods, [Noise(0.01), ZeroVector()])
ranking = found.summary().pivot(index="method", columns="intervention", values="spearman")
print(ranking.round(2))

assert len(table) == 3 * 6 * 12
assert ranking["noise 0.01"].idxmax() == "HTA, input"
assert ranking.loc["HTA, input", "noise 0.01"] > 0.8
