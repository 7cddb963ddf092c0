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


# 1. A subclass of Baseline, in a file of captum_hta/baselines/, with a name for tables, its axes, and its
#    values for one text.
class HiddenSimilarity(Baseline):
    """The cosine similarity of the hidden embeddings that enter a block."""

    name = "hidden similarity"
    axes = "batch layer query key"

    def values(self, activations: Activations) -> Tensor:
        """``[layer, query, key]``."""
        unit = torch.nn.functional.normalize(activations.hidden, dim=-1)
        return unit @ unit.mT


# 2. Its name in __all__ of captum_hta/baselines/__init__.py. The tests of all baselines then run on it: every
#    kind of model, padding, infinite activations and dropout.
# 3. Its place in ATTENTION_BASED or LOGIT_BASED of captum_hta/evaluation/methods.py, for the commands.
# 4. A row whose values are known, in test_on_paper of tests/baselines/test_baselines.py, and its name in the
#    list of README.md.


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
