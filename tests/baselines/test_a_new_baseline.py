"""How a baseline is added, step by step as in CONTRIBUTING, with a simple one as the example."""

from __future__ import annotations

import pytest
import torch
from conftest import WordTokenizer
from families import tiny, tiny_with_head
from torch import Tensor

from captum_hta import compare, contributions, load_model
from captum_hta.baselines import AttentionWeights, Baseline
from captum_hta.evaluation import Noise, compare_methods, faithfulness, methods
from captum_hta.integrations import TransformersModel
from captum_hta.model.activations import Activations


# 1. A subclass of Baseline, in the file of captum_hta/baselines that its idea belongs to, with a name for
#    tables, its axes, and its values for one text.
class HiddenSimilarity(Baseline):
    """The cosine similarity of the hidden embeddings that enter a block."""

    name = "hidden similarity"
    axes = "batch layer query key"

    def values(self, activations: Activations) -> Tensor:
        """``[layer, query, key]``."""
        unit = torch.nn.functional.normalize(activations.hidden, dim=-1)
        return unit @ unit.mT


# 2. Its name in __all__ of captum_hta/baselines/__init__.py: from then on tests/baselines asks it, as every
#    baseline, for numbers or a reason on every kind of model, for padding, finite activations and dropouts.
# 3. Its place in ATTENTION_BASED or LOGIT_BASED of captum_hta/evaluation/methods.py, if the commands compare.
# 4. A row whose values are known, in test_on_paper of tests/baselines/test_baselines.py.


def test_a_baseline_that_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Axes, padding and errors come with the class; comparisons and commands accept it."""
    monkeypatch.setattr(methods, "ATTENTION_BASED", (AttentionWeights, HiddenSimilarity))
    model = load_model(tiny_with_head("GPT-2"), tokenizer=WordTokenizer(60))
    texts = ["one two three four", "five"]
    found = HiddenSimilarity(model).attribute(texts)
    assert found.shape == (2, 3, 6, 6)
    assert found[1, :, 3:].isnan().all()
    torch.testing.assert_close(found[:, :, 0, 0], torch.ones(2, 3).double())
    assert set(compare(contributions(model, texts), {"new": found})["method"]) == {"new"}
    allowed, refused = methods.methods_for(model, texts[0], n_probes=None, with_logits=False)
    assert [method.name for method in allowed][2:] == ["attention", "hidden similarity"]
    assert not refused
    _, ranks = compare_methods(allowed, model, texts, [0, 1])
    assert "hidden similarity" in ranks.table()
    summary = faithfulness(model, texts[:1], allowed, [Noise(0.01)]).summary()
    assert summary.set_index("method")["spearman"].notna().all()
    crossing = TransformersModel(tiny("T5"), WordTokenizer(60), part="cross")
    with pytest.raises(ValueError, match="hidden similarity is not defined for cross attention"):
        HiddenSimilarity(crossing).attribute([("one", "two")])
