"""Images as vision transformers read them: pixel values, and patches labelled by row and column."""

from __future__ import annotations

import math
from collections.abc import Sequence
from os import PathLike
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from captum_hta.integrations.readers.contents import ContentReader
from captum_hta.model.encoding import Encoding

_MODES = {1: "L", 3: "RGB"}


class ImageReader(ContentReader):
    """Reads images with an image processor, or takes arrays of pixel values as they are.

    Args:
        tokenizer: An image processor of ``transformers``, or ``None``.
        shape: Channels, height and width that the model reads.
        patch: Height and width of a patch.
        special: Labels of the tokens before the patches.
        any_size: Whether the model reads images of any number of patches.
    """

    medium = "image"
    sampled: int | None = 6

    def __init__(
        self,
        tokenizer: Any,
        shape: tuple[int, int, int],
        patch: tuple[int, int],
        special: Sequence[str],
        any_size: bool = False,
    ) -> None:
        self.tokenizer, self.shape, self.patch, self.special = tokenizer, shape, patch, special
        self.any_size = any_size

    @property
    def reads(self) -> str:
        """What is accepted, in words."""
        return f"an image (a path, a PIL image or an array of shape {self._wanted})"

    @property
    def _wanted(self) -> str:
        channels, height, width = self.shape
        return f"[{channels}, height, width]" if self.any_size else f"[{channels}, {height}, {width}]"

    @property
    def longest(self) -> int | None:
        """The number of tokens of an image; ``None`` if it depends on the image."""
        return None if self.any_size else len(self.special) + math.prod(self.grid(self.shape))

    def accepts(self, image: object) -> bool:
        """Whether it is a path, a PIL image, or an array with three axes."""
        array = isinstance(image, np.ndarray | Tensor) and image.ndim == 3
        return array or isinstance(image, str | PathLike | Image.Image)

    def sample(self) -> Encoding:
        """The first tokens of some image that is not constant."""
        height, width = (2 * self.patch[0], 3 * self.patch[1]) if self.any_size else self.shape[1:]
        count = self.shape[0] * height * width
        waves = torch.arange(count, device="cpu").mul(0.7).sin()
        return self._encoding(waves.view(-1, height, width)).first(self.sampled)

    def encode(self, image: object, max_length: int | None = None) -> Encoding:
        """Read an image. It is never cut: there is a position for every patch.

        Raises:
            ValueError: If it cannot be read, or its size is not one that the model reads.
        """
        pixels = self._pixels(image)
        if not self._fits(pixels.shape):
            what = "the image" if self.tokenizer is None else "what the image processor gives"
            raise ValueError(
                f"{what} is of shape {list(pixels.shape)}, but the model reads {self._wanted}, in patches of "
                f"{self.patch[0]} x {self.patch[1]}: pass the image processor that belongs to the model"
            )
        return self._encoding(pixels)

    def _fits(self, shape: Sequence[int]) -> bool:
        if not self.any_size:
            return tuple(shape) == self.shape
        whole = all(side and side % step == 0 for side, step in zip(shape[1:], self.patch, strict=True))
        return whole and shape[0] == self.shape[0]

    def _pixels(self, image: Any) -> Tensor:
        """Pixel values ``[channel, height, width]``."""
        if isinstance(image, str | PathLike):
            image = opened(image)
        if self.tokenizer is None:
            return self._plain(image)
        if isinstance(image, Image.Image):
            image = self._colours(image)
        self._check_channels(image.shape)
        real = np.issubdtype(np.asarray(image).dtype, np.floating)
        options = {"do_rescale": False} if real else {}  # only numbers up to 255 are rescaled
        made = self.tokenizer(
            images=image, input_data_format="channels_first", return_tensors="pt", **options
        )
        pixels: Tensor = made["pixel_values"][0]
        return pixels

    def _colours(self, image: Image.Image) -> NDArray[np.uint8]:
        """Colours ``[channel, height, width]``, upright, with transparent areas on white."""
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # 16 bits
            image = Image.fromarray((np.asarray(image, dtype=np.int64) >> 8).clip(0, 255).astype(np.uint8))
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        colours = np.asarray(image.convert(_MODES.get(self.shape[0])))
        return colours.reshape(*colours.shape[:2], -1).transpose(2, 0, 1)

    def _check_channels(self, shape: Sequence[int]) -> None:
        """Raise a ``ValueError`` if the first axis of an array is not that of the channels."""
        if shape[0] != self.shape[0]:
            raise ValueError(
                f"the image is of shape {list(shape)}, but [{self.shape[0]}, height, width] is needed: "
                "move the axis of its channels to the front, or pass a PIL image"
            )

    def _plain(self, image: object) -> Tensor:
        """Pixel values of an array that needs no processor."""
        if isinstance(image, Image.Image):
            raise ValueError(
                "there is no image processor, which makes pixel values of an image: pass tokenizer="
                f"AutoImageProcessor.from_pretrained(...), or an array of shape {self._wanted}"
            )
        pixels = image if isinstance(image, Tensor) else torch.from_numpy(np.ascontiguousarray(image))
        return pixels.detach().cpu().to(torch.promote_types(pixels.dtype, torch.float32))

    def _encoding(self, pixels: Tensor) -> Encoding:
        rows, columns = self.grid(pixels.shape)
        places = [f"({row}, {column})" for row in range(rows) for column in range(columns)]
        return Encoding(
            [], [], [*self.special, *places],
            content=pixels, grid=(rows, columns), image=self._shown(pixels),
        )  # fmt: skip

    def grid(self, shape: Sequence[int]) -> tuple[int, int]:
        """Rows and columns of patches."""
        return shape[1] // self.patch[0], shape[2] // self.patch[1]

    def _shown(self, pixels: Tensor) -> NDArray[np.float64]:
        """Colours ``[height, width, 3]`` of pixel values; grey unless there are three channels."""
        colours = pixels.double().permute(1, 2, 0).numpy()
        if getattr(self.tokenizer, "do_normalize", False):
            colours = colours * self.tokenizer.image_std + self.tokenizer.image_mean
        elif self.tokenizer is None:
            colours = (colours - colours.min()) / max(np.ptp(colours), 1e-12)
        if colours.shape[2] != 3:
            colours = np.repeat(colours.mean(2, keepdims=True), 3, 2)
        return colours.clip(0, 1)


def opened(path: str | PathLike[str]) -> Image.Image:
    """Open an image file, and turn it upright.

    Raises:
        ValueError: If there is no such file, or it is no image.
    """
    try:
        with Image.open(path) as file:
            return ImageOps.exif_transpose(file)
    except UnidentifiedImageError as error:
        raise ValueError(
            f"{str(path)!r} is no image that can be read: pass a PNG, JPEG or the like"
        ) from error
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(
            f"no image is read from {str(path)!r} ({why}): pass the path of a PNG, JPEG or the like, of a "
            "moderate size"
        ) from error
