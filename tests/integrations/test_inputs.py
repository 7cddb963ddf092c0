"""Texts and models as people have them: what must happen to each."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import transformers
from conftest import WordTokenizer, tiny_bert
from families import tiny
from tokenizing import byte_level

from captum_hta import Contributions, contributions, load_model
from captum_hta.integrations import TransformersModel
from captum_hta.integrations.readers.texts import TextReader


def gpt2(tokenizer: object | None = None, **options: object) -> TransformersModel:
    """A tiny GPT-2 in float64 with a tokenizer of bytes."""
    torch.manual_seed(0)
    tokenizer = tokenizer or byte_level()
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=4, vocab_size=len(tokenizer), n_positions=40, **options
    )
    return TransformersModel(transformers.GPT2LMHeadModel(config).double().eval(), tokenizer)


def rows_sum_to_one(result: Contributions) -> bool:
    return all(
        torch.allclose(result.example(row).values.sum(-1), torch.ones((), dtype=result.values.dtype))
        for row in range(len(result))
    )


# --- texts -----------------------------------------------------------------------------------------

TEXTS = {
    "emoji": "I 😀 you 👩‍👩‍👧",
    "combining marks": "de\u0301ja\u0300 vu",
    "right to left": "שלום עולם",
    "Arabic": "السلام عليكم",
    "Chinese": "今天天气很好",
    "unknown to most": "ᚠᛇᚻ ☃",
    "code": "def f(x):\n    return x\t# done",
    "repeated": "the the the the",
    "one character": "a",
    "zero width": "a\u200bb",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_texts_of_a_decoder(text: str) -> None:
    """Rows sum to 1, and labels are of the text, without the marks of a tokenizer."""
    result = contributions(gpt2(), text)
    assert rows_sum_to_one(result)
    assert not any("Ġ" in token or "Ċ" in token for token in result.tokens[0])
    assert all(token in text or token in "␣↵⇥" for token in result.tokens[0])


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_texts_of_an_encoder(text: str, minilm) -> None:
    """The same of the real BERT, with its special tokens."""
    result = contributions(minilm, text, source="previous_layer")
    assert rows_sum_to_one(result)
    assert result.tokens[0][0] == "[CLS]"
    assert result.tokens[0][-1] == "[SEP]"
    assert not any(token.startswith("##") for token in result.tokens[0])


def test_empty_text(minilm) -> None:
    """An encoder has its special tokens; a decoder without BOS has nothing to read."""
    assert contributions(minilm, "", source="previous_layer").tokens == [["[CLS]", "[SEP]"]]
    assert contributions(minilm, " \n", source="previous_layer").tokens == [["[CLS]", "[SEP]"]]
    with pytest.raises(ValueError, match="text 1 has no token"):
        contributions(gpt2(), ["a", ""])


def test_repeated_tokens_are_told_apart() -> None:
    """By position: equal tokens have contributions of their own."""
    result = contributions(gpt2(), "the the the")
    assert result.values[0, 1, 0, -1].unique().numel() == result.values.shape[-1]


# --- padding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", [None, "<|end|>"])
def test_padding_of_a_decoder(side: str, pad: str | None) -> None:
    """The padding settings of the tokenizer do not matter, and are left as they were."""
    tokenizer = byte_level(pad=pad)
    tokenizer.padding_side = side
    model = gpt2(tokenizer)
    texts = ["the cat sat on the mat", "so"]
    together = contributions(model, texts)
    for index, text in enumerate(texts):
        alone = contributions(model, text)
        torch.testing.assert_close(together.example(index).values, alone.values, rtol=1e-8, atol=1e-12)
    assert tokenizer.pad_token == pad
    assert tokenizer.padding_side == side


def test_slow_tokenizer() -> None:
    """Without offsets labels are what tokens stand for, and there are no words."""

    class Slow:
        is_fast, pad_token_id, all_special_ids = False, 0, [1]

        def __call__(self, *texts: str, **options: object) -> dict[str, list[int]]:
            return {"input_ids": [1, 2, 3]}

        def convert_ids_to_tokens(self, token: int) -> str:
            return ["<pad>", "<s>", "▁hello", "##s"][token]

        def convert_tokens_to_string(self, tokens: list[str]) -> str:
            return tokens[0].replace("▁", " ")

    encoding = TextReader(Slow(), 4).encode("hellos")
    assert encoding.tokens == ["<s>", "hello", "s"]
    assert encoding.words is None


PIECES = ["<unk>", "<s>", "</s>", "<pad>", "<bos>", "<eos>", "▁", *"theca sonm", "th", "▁th"]


@pytest.mark.parametrize("cls", [transformers.LlamaTokenizer, transformers.GemmaTokenizer])
def test_words_of_tokenizers_that_do_not_split_at_blanks(cls: type) -> None:
    """Their word ids are all 0; words are then what stands between blanks."""
    pieces = list(dict.fromkeys(PIECES))
    words = cls(
        vocab={piece: number for number, piece in enumerate(pieces)}, merges=[("t", "h"), ("▁", "th")]
    )
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    model = load_model(transformers.LlamaForCausalLM(config).eval(), words)
    found = contributions(model, "the cat  the sat", source="previous_layer").to_words()
    assert [token for token in found.tokens[0] if not token.startswith("<")] == ["the", "cat", "the", "sat"]
    assert rows_sum_to_one(found)


@pytest.mark.parametrize("pad", ["beyond", "negative"])
def test_a_padding_token_that_the_model_does_not_embed(pad: str) -> None:
    """Any id that it embeds will do, since the mask hides it."""
    words = WordTokenizer(60)
    expected = contributions(load_model(tiny("GPT-2"), words), ["a b c", "a"])
    words.pad_token_id = 60 if pad == "beyond" else -1
    found = contributions(load_model(tiny("GPT-2"), words), ["a b c", "a"])
    torch.testing.assert_close(found.values, expected.values, equal_nan=True)


def test_bytes_are_labelled_as_such() -> None:
    """A byte that is no character alone is not shown as another character."""
    tokens = TextReader(transformers.ByT5Tokenizer(), 384).encode("aï 日\n").tokens
    assert tokens == ["a", "<0xC3>", "<0xAF>", "␣", "<0xE6>", "<0x97>", "<0xA5>", "↵", "</s>"]


def test_deberta_without_positions_reads_any_length() -> None:
    """Its table of positions is not used, so the number of its rows is no limit."""
    torch.manual_seed(0)
    config = transformers.DebertaV2Config(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=8, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=4,
        position_biased_input=False, share_att_key=True,
    )  # fmt: skip
    model = load_model(transformers.DebertaV2Model(config).eval(), WordTokenizer())
    assert model.max_length is None
    assert rows_sum_to_one(contributions(model, "a b c d e f g h i j", source="previous_layer"))


# --- models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("source", ["input", "previous_layer"])
def test_half_precision(dtype: torch.dtype, source: str) -> None:
    """Rows sum to 1 within 2e-3 and are near those of the same weights in float32."""
    torch.manual_seed(0)
    model = transformers.GPT2Model(transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=300))
    half = load_model(model.eval(), tokenizer=byte_level(), dtype=dtype)
    result = contributions(half, "the cat sat", source=source)
    assert result.values.dtype == torch.float32
    torch.testing.assert_close(
        result.values.sum(-1), torch.ones_like(result.values[..., 0]), rtol=0, atol=2e-3
    )
    exact = contributions(
        load_model(half.model, half.tokenizer, dtype=torch.float32), "the cat sat", source=source
    )
    assert (result.values - exact.values).abs().max() < 0.03


def test_autocast(minilm) -> None:
    """What is around the call is not the model's own: the result is that without it."""
    expected = contributions(minilm, "Dogs bark.", layers=[1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = contributions(minilm, "Dogs bark.", layers=[1])
    torch.testing.assert_close(found.values, expected.values)


def test_training_mode_is_refused() -> None:
    """With an active dropout there is no derivative of its own."""
    model = gpt2()
    model.model.train()
    with pytest.raises(ValueError, match="call its eval"):
        contributions(model, "the cat")


def test_a_trained_model_is_loaded_in_eval_mode() -> None:
    """On a copy, so that the caller's stays in training."""
    model = tiny("Llama").train()
    contributions(load_model(model, tokenizer=WordTokenizer(60)), "cat", layers=[0])
    assert model.training


def test_meta_device() -> None:
    """Weights on the meta device are an error."""
    with torch.device("meta"):
        model = transformers.GPT2Model(
            transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=300)
        )
    with pytest.raises(ValueError, match="meta"):
        load_model(model.eval(), tokenizer=byte_level())


def test_tied_weights_and_two_models() -> None:
    """Two models in one process do not disturb each other; tied weights stay tied."""
    first, second = gpt2(), gpt2(tie_word_embeddings=True, activation_function="relu")
    expected = contributions(first, "the cat").values
    contributions(second, "the cat")
    torch.testing.assert_close(contributions(first, "the cat").values, expected, rtol=0, atol=0)
    assert second.model.lm_head.weight is second.model.transformer.wte.weight


@pytest.mark.parametrize("source", ["input", "previous_layer"])
def test_two_threads(source: str) -> None:
    """The same model from two threads: each has its own result, and the model is as it was."""
    model = gpt2()
    texts = ["the cat sat on the mat", "dogs bark at night"]
    expected = [contributions(model, text, source=source).values for text in texts]
    found: dict[tuple[int, int], torch.Tensor] = {}

    def work(number: int) -> None:
        for turn in range(4):
            found[number, turn] = contributions(model, texts[number], source=source).values

    before = model.model.config._attn_implementation
    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    for (number, _), values in found.items():
        torch.testing.assert_close(values, expected[number], rtol=1e-9, atol=1e-12)
    assert model.model.config._attn_implementation == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.model.modules())


def test_hooks_of_the_user_act() -> None:
    """An ablation changes the result, and takes the general mode."""
    model = gpt2()
    expected = contributions(model, "the cat sat", source="previous_layer")
    handle = model.places[1].attention.register_forward_hook(lambda module, args, out: (out[0] * 0, *out[1:]))
    try:
        found = contributions(model, "the cat sat", source="input", target="layer", layers=[1])
        local = contributions(model, "the cat sat", source="previous_layer")
    finally:
        handle.remove()
    whole = contributions(model, "the cat sat", source="input", target="layer", layers=[1])
    assert (found.values - whole.values).abs().max() > 1e-3
    assert {plan.mode for plan in local.plans} != {"closed form"}
    torch.testing.assert_close(local.values[:, 0], expected.values[:, 0], rtol=1e-8, atol=1e-12)


def test_a_copy_of_the_model_is_another() -> None:
    """Nothing is kept from one model for another."""
    model = gpt2()
    other = copy.deepcopy(model.model)
    with torch.no_grad():
        other.transformer.h[0].attn.c_attn.weight.mul_(2)
    changed = TransformersModel(other, model.tokenizer)
    first, second = (
        contributions(one, "the cat", source="previous_layer").values for one in (model, changed)
    )
    assert (first - second).abs().max() > 1e-4


@pytest.mark.parametrize("text", ["  ", "  a  b "])
def test_words_of_blanks_have_labels(text: str) -> None:
    """No label is empty."""
    words = contributions(gpt2(), text).to_words()
    assert all(words.tokens[0])


# --- modes of torch, heads of a user ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "Llama", "ViT"])
def test_autocast_changes_nothing(name: str) -> None:
    """Numbers are those in the types of the weights, at loading too."""
    tokenizer = None if name == "ViT" else WordTokenizer(60)
    plain = tiny(name).float()
    text = torch.rand(3, 12, 12) if name == "ViT" else "a b c"
    expected = contributions(TransformersModel(plain, tokenizer), text)
    with torch.autocast("cpu", torch.bfloat16):
        model = TransformersModel(plain, tokenizer)
        found = contributions(model, text)
        assert model.size.closed_form
    torch.testing.assert_close(found.values, expected.values)
    torch.testing.assert_close(found.attention, expected.attention)


@pytest.mark.parametrize("name", ["DINOv2", "Llama", "BART"])
def test_dropouts_that_are_no_modules(name: str) -> None:
    """Stochastic depth and functional dropout are seen in training mode."""
    model = tiny(name)
    options = {"DINOv2": "drop_path_rate", "Llama": "attention_dropout", "BART": "attention_dropout"}
    torch.manual_seed(0)
    config = model.config
    setattr(config, options[name], 0.5)
    training = type(model)(config).double().train()
    part = "encoder" if name == "BART" else None
    tokenizer = None if name == "DINOv2" else WordTokenizer(60)
    with pytest.raises(ValueError, match=r"dropout that is active: call its eval\(\)"):
        TransformersModel(training, tokenizer, part=part)
    assert TransformersModel(training.eval(), tokenizer, part=part).num_layers


def test_a_classifier_keeps_its_head() -> None:
    """It is not bridged by default, so that its logits are there."""
    model = load_model(tiny_bert(transformers.BertForSequenceClassification), tokenizer=WordTokenizer())
    assert isinstance(model, TransformersModel)
    batch = model.batch([model.encode("a b")])
    assert model.logits(*batch.inputs, *batch.extra).shape == (1, 2)
    assert not isinstance(load_model(tiny_bert(), tokenizer=WordTokenizer()), TransformersModel)
