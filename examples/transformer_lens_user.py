"""For TransformerLens users: contributions in place of attention patterns, for all layers at once."""

from captum_hta import contributions, load_model

model = load_model()  # or a name, a folder, a transformers model, a bridge
pair = ("The trophy did not fit in the suitcase.", "It was too big.")
local = contributions(model, [pair], source="previous_layer")  # exact, about the price of a forward
total = contributions(model, [pair], source="input", n_probes=16)

layer, head, query = 4, 7, total.tokens[0].index("It")
for name, values in {
    "attention": total.attention,
    "local": local.values,
    "input": total.values,
}.items():
    row = values[0, layer, head, query]
    print(f"{name:>9}:", ", ".join(f"{total.tokens[0][i]} {row[i]:.0%}" for i in row.topk(4).indices))

assert local.values.shape == total.values.shape == (1, 6, 12, 17, 17)
assert local.standard_error is None
assert total.standard_error.max() < 0.1
# The general class agrees with the closed form, on the same hook points.
again = contributions(model, [pair], source="previous_layer", layers=4, mode="reverse")
assert (again.values - local.values[:, 4:5]).abs().max() < 1e-4
