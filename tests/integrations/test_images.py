"""Vision transformers, whose tokens are patches, against plain autograd; and images as people have them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from conftest import WordTokenizer
from families import IMAGES, tiny
from PIL import Image
from reference import jacobian, norms, shares
from torch import Tensor

from captum_hta import contributions, load_model
from captum_hta.computation import fingerprint
from captum_hta.integrations import TransformersModel

CLOSE = {"rtol": 2e-5, "atol": 1e-7}
MARKS = {"ViT": ["[CLS]"], "DeiT": ["[CLS]", "[DIST]"], "DINOv2": ["[CLS]"]}
every_model = pytest.mark.parametrize("name", IMAGES)
every_source = pytest.mark.parametrize("source", ["input", "previous_layer"])


def images(count: int, height: int = 12, width: int = 12) -> Tensor:
    """Noise ``[image, channel, height, width]``."""
    return torch.randn(
        count, 3, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )


def processor(**options: object) -> hf.ViTImageProcessorPil:
    """An image processor for images of 12 x 12."""
    return hf.ViTImageProcessorPil(**({"size": {"height": 12, "width": 12}} | options))


@functools.cache
def adapter(name: str) -> TransformersModel:
    """Without a processor."""
    return TransformersModel(tiny(name), None)


def photograph(mode: str = "RGB", size: tuple[int, int] = (30, 20)) -> Image.Image:
    """An image of noise."""
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(noise).convert(mode)


def passed(
    name: str, image: Tensor, source: int, layer: int, kind: str
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """From what enters one block to a target of another, by hooks of the test's own."""
    family, model = IMAGES[name], adapter(name).model
    start, end = (model.get_submodule(family.block.format(number)) for number in (source, layer))
    seen: dict[str, Tensor] = {}

    def run(x: Tensor | None) -> Tensor:
        def enter(module: object, args: tuple) -> tuple | None:
            seen["x"] = args[0]
            return None if x is None else (x, *args[1:])

        handles = [start.register_forward_pre_hook(enter)]
        if kind == "head":
            projection = end.get_submodule(family.projection)
            handles.append(projection.register_forward_pre_hook(lambda module, args: seen.update(y=args[0])))
        else:
            handles.append(end.register_forward_hook(lambda module, args, out: seen.update(y=out)))
        model(image[None])
        for handle in handles:
            handle.remove()
        return seen["y"]

    run(None)
    return run, seen["x"].detach()


@pytest.mark.parametrize("kind", ["head", "layer"])
@every_source
@every_model
def test_contributions_equal_autograd(name: str, source: str, kind: str) -> None:
    """Every layer, head and query."""
    (image,) = images(1)
    found = contributions(adapter(name), image, source=source, target=kind)
    for layer in (0, 2):
        run, x = passed(name, image, 0 if source == "input" else layer, layer, kind)
        heads = 4 if kind == "head" else 1
        expected = shares(norms(jacobian(run, x, range(len(found.tokens[0]))), heads, "frobenius"))
        torch.testing.assert_close(
            found.values[0, layer], expected if kind == "head" else expected[0], **CLOSE
        )


@every_model
def test_closed_form(name: str) -> None:
    """It holds, was proven, and gives what the general mode gives."""
    model, (image,) = adapter(name), images(1)
    found = contributions(model, image, source="previous_layer")
    assert {plan.mode for plan in found.plans} == {"closed form"}
    assert sum("closed form equals autograd" in check.name for check in model.checks) == 3
    general = contributions(model, image, source="previous_layer", mode="forward")
    torch.testing.assert_close(found.values, general.values, **CLOSE)


@every_source
@every_model
def test_batches_equal_single_images(name: str, source: str) -> None:
    """A tensor of images, a list of them, or one."""
    both = images(2)
    together = contributions(adapter(name), both, source=source)
    listed = contributions(adapter(name), list(both), source=source)
    torch.testing.assert_close(together.values, listed.values, rtol=0, atol=0)
    assert (together.values[0] - together.values[1]).abs().max() > 1e-4
    for index, image in enumerate(both):
        alone = contributions(adapter(name), image, source=source)
        torch.testing.assert_close(together.example(index).values, alone.values, **CLOSE)
        torch.testing.assert_close(together.example(index).attention, alone.attention, **CLOSE)


@every_model
def test_attention_is_the_models_own(name: str) -> None:
    """The patterns that the model hands out in eager attention."""
    both = images(2)
    found = contributions(adapter(name), both, source="previous_layer")
    plain = tiny(name)
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        expected = plain(both, output_attentions=True).attentions
    torch.testing.assert_close(found.attention, torch.stack(expected, 1), rtol=1e-6, atol=1e-8)


@every_model
def test_labels_are_places(name: str) -> None:
    """Row and column of each patch, after the special tokens."""
    found = contributions(adapter(name), images(1), source="previous_layer")
    places = [f"({row}, {column})" for row in range(3) for column in range(3)]
    assert found.tokens == [MARKS[name] + places]
    assert found.encodings[0].grid == (3, 3)
    with pytest.raises(ValueError, match="not made of words"):
        found.to_words()


def test_a_place_is_where_its_patch_is() -> None:
    """What changes in the pixels of (1, 2) changes its source vector, and no other."""
    model, (image,) = adapter("ViT"), images(1)
    changed = image.clone()
    changed[:, 4:8, 8:12] += 1
    _, before = passed("ViT", image, 0, 0, "head")
    _, after = passed("ViT", changed, 0, 0, "head")
    moved = (after - before)[0].abs().sum(-1) > 0
    labels = model.encode(image).tokens
    assert [label for label, has_moved in zip(labels, moved, strict=True) if has_moved] == ["(1, 2)"]


@every_model
def test_loading_looks_at_few_tokens(name: str) -> None:
    """Checking an image of full size would take minutes. No hook is left behind."""
    model = TransformersModel(tiny(name), None)
    assert "[1, 6, 16]" in {check.found for check in model.checks}
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.model.modules())
    assert model.attention(model.batch([model.encode(images(1)[0])]))[0].pattern.shape[-1] > 9


def test_images_of_any_size() -> None:
    """DINOv2 segments its positions; the grid is that of the image."""
    wide = images(1, 8, 16)
    found = contributions(adapter("DINOv2"), wide)
    assert found.encodings[0].grid == (2, 4)
    assert found.values.shape[-1] == 9
    assert adapter("DINOv2").max_length is None
    with pytest.raises(ValueError, match=r"\[3, 8, 10\], but the model reads \[3, height, width\]"):
        contributions(adapter("DINOv2"), images(1, 8, 10))
    sizes = [wide[0], wide[0].mT.contiguous(), images(1, 8, 8)[0]]
    together = contributions(adapter("DINOv2"), sizes)
    for index, image in enumerate(sizes):
        alone = contributions(adapter("DINOv2"), image)
        torch.testing.assert_close(together.example(index).values, alone.values, **CLOSE)


def test_patches_that_are_no_squares() -> None:
    """Heights and widths are kept apart."""
    config = hf.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=4, image_size=(12, 20), patch_size=(6, 4)
    )
    found = contributions(TransformersModel(hf.ViTModel(config).eval(), None), images(1, 12, 20).float())
    assert found.encodings[0].grid == (2, 5)
    assert found.tokens[0][-1] == "(1, 4)"


def test_probes_depend_on_the_image() -> None:
    """The same alone and among others; other images have other directions."""
    both = images(2)
    together = contributions(adapter("ViT"), both, n_probes=4)
    alone = contributions(adapter("ViT"), both[1], n_probes=4)
    torch.testing.assert_close(together.example(1).values, alone.values, **CLOSE)
    first, second, again = (fingerprint(adapter("ViT").encode(one)) for one in (*both, both[0]))
    assert first == again != second


# --- what is read ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
def test_a_path_an_image_and_an_array_are_one_image(mode: str, tmp_path: Path) -> None:
    """Whatever the colours are kept as."""
    model = TransformersModel(tiny("ViT"), processor())
    image = photograph(mode)
    image.save(tmp_path / "a.png")
    array = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    expected = contributions(model, image, source="previous_layer").values
    for other in (tmp_path / "a.png", str(tmp_path / "a.png"), array, torch.tensor(array)):
        found = contributions(model, other, source="previous_layer").values
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_pixel_values_are_those_of_the_processor() -> None:
    """And the image that is shown is the one that is read."""
    image = photograph(size=(12, 12))
    encoding = TransformersModel(tiny("ViT"), processor()).encode(image)
    expected = processor()(images=image, return_tensors="pt").pixel_values[0]
    torch.testing.assert_close(encoding.content, expected, rtol=0, atol=0)
    np.testing.assert_allclose(encoding.image, np.asarray(image) / 255, atol=1e-6)


def test_grey_models() -> None:
    """One channel; what is shown has three."""
    config = hf.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        image_size=12,
        patch_size=4,
        num_channels=1,
    )
    model = TransformersModel(hf.ViTModel(config).eval(), processor(image_mean=[0.5], image_std=[0.5]))
    assert contributions(model, photograph()).encodings[0].image.shape == (12, 12, 3)


def test_an_image_on_its_side_is_turned(tmp_path: Path) -> None:
    """As cameras note it."""
    image, turned = photograph(), Image.Exif()
    turned[0x0112] = 6
    image.save(tmp_path / "a.png", exif=turned)
    model = TransformersModel(tiny("ViT"), processor())
    upright = image.transpose(Image.Transpose.ROTATE_270)
    torch.testing.assert_close(model.encode(tmp_path / "a.png").content, model.encode(upright).content)


# --- loading and errors ----------------------------------------------------------------------------


def test_a_folder_with_its_processor(tmp_path: Path) -> None:
    """With any head; the processor is the one saved there."""
    torch.manual_seed(0)
    config = tiny("ViT").config
    hf.ViTForImageClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no image processor is found"):
        load_model(tmp_path)
    processor(image_mean=[0.1, 0.2, 0.3]).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert model.architecture == "ViTForImageClassification"
    expected = processor(image_mean=[0.1, 0.2, 0.3])(images=photograph(), return_tensors="pt").pixel_values[0]
    torch.testing.assert_close(model.encode(photograph()).content, expected)


def test_a_processor_is_optional() -> None:
    """For arrays; an image needs one."""
    model = load_model(tiny("ViT"))
    assert contributions(model, images(1)[0].numpy()[:, ::-1]).values.shape == (1, 3, 4, 10, 10)
    with pytest.raises(ValueError, match="there is no image processor"):
        contributions(model, photograph())
    with pytest.raises(ValueError, match="carries no tokenizer"):
        load_model(tiny("BERT"))


PROBLEMS: dict[str, tuple[object, type[Exception], str]] = {
    "pair": (("one", "two"), ValueError, "no image is read from 'one'"),
    "pairs": ([("one", "two")], TypeError, r"image 0 must be an image .*\[3, 12, 12\]\), got \('one'"),
    "text": ("one two three", ValueError, "no image is read from 'one two three'"),
    "no image": (__file__, ValueError, "is no image that can be read"),
    "folder": (Path(__file__).parent, ValueError, "no image is read"),
    "size": (torch.zeros(3, 16, 16), ValueError, r"\[3, 16, 16\], but the model reads \[3, 12, 12\]"),
    "channels last": (torch.zeros(12, 12, 3), ValueError, r"\[12, 12, 3\], but the model reads"),
    "grey": (torch.zeros(12, 12), TypeError, "image 0 must be an image"),
    "number": (5, TypeError, "must be a list, each of them an image"),
    "none": ([], ValueError, "there is no image"),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_what_is_no_image(problem: str) -> None:
    """The error names what is read."""
    given, kind, words = PROBLEMS[problem]
    with pytest.raises(kind, match=words):
        contributions(adapter("ViT"), given)


def test_a_processor_of_another_model() -> None:
    """Its images have another size."""
    model = TransformersModel(tiny("ViT"), processor(size={"height": 16, "width": 16}))
    with pytest.raises(ValueError, match=r"the image processor gives is of shape \[3, 16, 16\]"):
        contributions(model, photograph())


@pytest.mark.parametrize(
    "image", [photograph(), torch.zeros(3, 12, 12), Path("a.png")], ids=["image", "array", "path"]
)
def test_models_of_text_refuse_images(image: object) -> None:
    """And say what they read."""
    model = TransformersModel(tiny("BERT"), WordTokenizer(60))
    with pytest.raises(TypeError, match="a string, a pair of strings, token ids or chat messages"):
        contributions(model, [image])


def test_a_tokenizer_is_no_processor() -> None:
    """The error names what to pass."""
    with pytest.raises(TypeError, match="ViTModel reads images: pass an image processor, got WordTokenizer"):
        load_model(tiny("ViT"), tokenizer=WordTokenizer(60))


def test_transformer_lens_does_not_bridge_them() -> None:
    """The error names the remedy."""
    with pytest.raises(ValueError, match="reads texts, and ViTModel images: leave out adapter"):
        load_model(tiny("ViT"), adapter="transformer_lens")


def test_the_same_image_in_every_form(tmp_path: Path) -> None:
    """Integers or numbers up to 1, a path or an image with a note how to turn it, 16 bits: one reading."""
    model = TransformersModel(tiny("ViT"), processor())
    plain = photograph(size=(12, 12))
    array = np.asarray(plain).transpose(2, 0, 1)
    expected = model.encode(plain).content
    for same in (array, array / 255.0, torch.from_numpy(array.copy())):
        torch.testing.assert_close(model.encode(same).content, expected, rtol=1e-5, atol=1e-5)
    turned = Image.Exif()
    turned[274] = 6
    photograph().save(tmp_path / "turned.jpg", exif=turned)
    with Image.open(tmp_path / "turned.jpg") as image:
        torch.testing.assert_close(model.encode(image).content, model.encode(tmp_path / "turned.jpg").content)
    deep = np.asarray(plain.convert("L")).astype(np.uint16) * 257
    Image.fromarray(deep).save(tmp_path / "deep.png")
    torch.testing.assert_close(
        model.encode(tmp_path / "deep.png").content, model.encode(plain.convert("L")).content
    )


def test_what_is_transparent_is_white() -> None:
    """Not the colour that it hides."""
    model = TransformersModel(tiny("ViT"), processor())
    hidden = Image.new("RGBA", (12, 12), (0, 0, 0, 0))
    white = Image.new("RGB", (12, 12), "white")
    torch.testing.assert_close(model.encode(hidden).content, model.encode(white).content)


def test_channels_elsewhere() -> None:
    """The error tells which axis is meant."""
    model = TransformersModel(tiny("ViT"), processor())
    with pytest.raises(ValueError, match="move the axis of its channels to the front"):
        model.encode(np.zeros((12, 12, 3), dtype=np.uint8))
