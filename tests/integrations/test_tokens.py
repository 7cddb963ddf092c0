"""Token ids, chat messages and special tokens: what the model reads is what the user asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from tokenizers import processors
from tokenizing import byte_level
from transformer_lens.head_detector import detect_head
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources import build_bridge_from_module

from captum_hta import contributions, load_model
from captum_hta.integrations import TransformersModel

TEMPLATE = (
    "{% for m in messages %}<|end|>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
CHAT = [{"role": "user", "content": "dogs bark"}]


def gpt2(tokenizer: object, **options: object) -> TransformersModel:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=300, n_positions=80)
    return load_model(
        transformers.GPT2LMHeadModel(config).double().eval(), tokenizer, adapter="transformers", **options
    )


def chatting(bos: bool = False) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer with a chat template that begins with BOS, which the tokenizer may add to texts too."""
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE
    tokenizer.bos_token = "<|end|>"
    if bos:
        core = tokenizer.backend_tokenizer
        core.post_processor = processors.TemplateProcessing(
            single="<|end|> $A", pair="<|end|> $A $B", special_tokens=[("<|end|>", tokenizer.eos_token_id)]
        )
    return tokenizer


# --- token ids -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, np.array])
def test_token_ids(kind: type) -> None:
    """They are the text itself, and give its very numbers, one text or several."""
    model = gpt2(byte_level())
    ids = model.encode("the cat sat").ids
    expected = contributions(model, ["the cat sat", "dogs bark at night"], n_probes=4)
    other = kind(model.encode("dogs bark at night").ids)
    found = contributions(model, [kind(ids), other], n_probes=4)
    assert torch.equal(found.values.nan_to_num(-1), expected.values.nan_to_num(-1))
    assert found.tokens == expected.tokens
    alone = contributions(model, kind(ids), n_probes=4)
    torch.testing.assert_close(alone.values, expected.example(0).values)


def test_token_ids_with_special_tokens(minilm) -> None:
    """None are added to them, and those that they have are labelled."""
    ids = minilm.encode("Dogs bark.").ids
    found = contributions(minilm, ids, source="previous_layer")
    assert found.tokens == [["[CLS]", "dogs", "bark", ".", "[SEP]"]]
    inner = contributions(minilm, ids[1:-1], source="previous_layer")
    assert inner.tokens == [["dogs", "bark", "."]]
    with pytest.raises(ValueError, match="use a fast tokenizer, and strings, not token ids"):
        inner.to_words()


@pytest.mark.parametrize(
    ("ids", "words"),
    [([5, 300], "there is no token 300.*0 to 299"), ([-1], "there is no token -1"),
     ([5, 6, 1, 1], "end with the padding token 1"), ([1, 1, 5], "begin or end with the padding")],
)  # fmt: skip
def test_token_ids_that_no_text_has(ids: list[int], words: str) -> None:
    """Padding would count as part of the text; where it is EOS too, one is not padding."""
    tokenizer = byte_level()
    tokenizer.pad_token_id = tokenizer.eos_token_id = 1
    model = gpt2(tokenizer)
    assert len(model.encode([5, 6, 1])) == 3
    with pytest.raises(ValueError, match=words):
        contributions(model, [ids])
    tokenizer.eos_token_id = 0
    with pytest.raises(ValueError, match="padding token 1"):
        contributions(model, [[5, 6, 1]])


# --- chat messages ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bos", [False, True])
def test_chat_messages(bos: bool) -> None:
    """The template's tokens, its BOS once; a conversation that waits for an answer gets its prompt."""
    tokenizer = chatting(bos)
    model = gpt2(tokenizer)
    expected = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    encoding = model.encode(CHAT)
    assert encoding.ids == expected
    assert encoding.ids[:2].count(tokenizer.bos_token_id) == 1
    assert contributions(model, CHAT).tokens == contributions(model, [CHAT]).tokens == [encoding.tokens]
    answered = [*CHAT, {"role": "assistant", "content": "yes"}]
    assert model.encode(answered).ids == tokenizer.apply_chat_template(answered, return_dict=False)


def test_bos_of_a_chat_that_is_written_out() -> None:
    """It is not doubled; two that the user writes are two."""
    tokenizer = chatting(bos=True)
    model = gpt2(tokenizer)
    end = tokenizer.bos_token_id
    plain = model.encode("dogs").ids
    assert plain[0] == end != plain[1]
    assert model.encode("<|end|>dogs").ids == plain
    assert model.encode("<|end|><|end|>dogs").ids == [end, end, *plain]


def test_chat_without_a_template() -> None:
    with pytest.raises(ValueError, match=r"no chat template: set tokenizer\.chat_template"):
        contributions(gpt2(byte_level()), CHAT)
    with pytest.raises(TypeError, match="must be a string"):
        contributions(gpt2(chatting()), [{"role": "user"}])


# --- special tokens --------------------------------------------------------------------------------


def test_without_special_tokens(minilm) -> None:
    """None follows the tokenizer; pairs and encoder-decoder models too."""
    bare = load_model(adapter="transformers", add_special_tokens=False)
    assert contributions(bare, "Dogs bark.", source="previous_layer").tokens == [["Dogs", "bark", "."]]
    assert bare.encode(("Dogs", "bark")).tokens == ["Dogs", "bark"]
    added = load_model(adapter="transformers", add_special_tokens=True)
    assert added.encode("Dogs bark.") == minilm.encode("Dogs bark.")


def test_special_tokens_of_the_encoder_alone() -> None:
    """The decoder begins with its own first token."""
    tokenizer = transformers.ByT5Tokenizer()
    config = transformers.T5Config(
        vocab_size=384, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model = transformers.T5Model(config).eval()
    bare = load_model(model, tokenizer, part="cross", add_special_tokens=False)
    encoding = bare.encode(("ab", "c"))
    assert encoding.context.tokens == ["a", "b"]
    assert len(encoding) == 2


# --- bridges ---------------------------------------------------------------------------------------


def bridge(tokenizer: object, **settings: bool) -> TransformerBridge:
    """A user's own bridge."""
    model = gpt2(byte_level()).model
    made = build_bridge_from_module(model, "GPT2LMHeadModel", hf_config=model.config)
    made.tokenizer = tokenizer
    for name, value in settings.items():
        setattr(made.cfg, name, value)
    return made


@pytest.mark.parametrize("default", [True, False])
@pytest.mark.parametrize("adds", [True, False])
def test_tokens_of_the_users_bridge(default: bool, adds: bool) -> None:
    """They are those of its to_tokens, BOS included; those of a tokenizer that is passed are its own."""
    tokenizer = chatting(bos=adds)
    tokenizer.pad_token = tokenizer.eos_token
    own = bridge(tokenizer, default_prepend_bos=default, tokenizer_prepends_bos=adds)
    model = load_model(own)
    encoding = model.encode("aab")
    assert encoding.ids == own.to_tokens("aab")[0].tolist()
    assert (encoding.ids[0] == tokenizer.bos_token_id) is default
    assert encoding.words[-1] is not None
    assert model.encode("aab", 2) == encoding.first(2)
    given = load_model(own, tokenizer).encode("aab").ids
    assert given == tokenizer("aab")["input_ids"]


@pytest.mark.parametrize("adds", [True, False])
def test_tools_of_transformer_lens(adds: bool) -> None:
    """The bridge of a loaded model has its tokenizer, and the same tokens; the user's tokenizer is not
    changed.
    """
    tokenizer = chatting(bos=adds)
    model = load_model(gpt2(byte_level()).model, tokenizer, adapter="transformer_lens")
    ids = model.encode("aab").ids
    assert model.bridge.to_tokens("aab").tolist() == [ids]
    assert model.bridge.to_tokens("aab", prepend_bos=True)[0, 0] == tokenizer.bos_token_id
    assert model.bridge.to_tokens("aab", prepend_bos=False)[0, 0] != tokenizer.bos_token_id
    assert tokenizer.pad_token is None
    scores = detect_head(model.bridge, "aab", "previous_token_head")
    assert scores.shape == (model.num_layers, model.num_heads)


def test_options_without_a_tokenizer() -> None:
    """Images have no special tokens."""
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=8,
        patch_size=4,
    )
    with pytest.raises(ValueError, match="images, which have no special tokens"):
        load_model(transformers.ViTModel(config).eval(), add_special_tokens=False)
