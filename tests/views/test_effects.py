"""The figure of effects: what its panels show."""

from __future__ import annotations

import numpy as np
import pytest

from captum_hta.views.effects import effects_figure


@pytest.mark.parametrize(("layers", "tokens", "rows"), [(30, 14, 10), (3, 2, 1), (96, 200, 10)])
def test_panels(layers: int, tokens: int, rows: int) -> None:
    """All effects with white at zero, two maps on one scale and the signed parts, with their labels."""
    numbers = np.random.default_rng(0)
    effects = numbers.normal(size=(layers, 9))
    maps = {name: numbers.dirichlet(np.ones(tokens), rows) for name in ("attention", "input")}
    signed, names = numbers.normal(size=(rows, tokens)), [f"L{row}H0" for row in range(rows)]
    figure = effects_figure(effects, maps, signed, names, [f"t{key}" for key in range(tokens)], "on ' a_$b'")
    panels = [axis for axis in figure.axes if axis.get_images()][:4]
    images = [axis.get_images()[0] for axis in panels]
    for image, values in zip(images, [effects, *maps.values(), signed], strict=True):
        np.testing.assert_array_equal(image.get_array(), values)
    assert images[0].norm(0.0) == images[3].norm(0.0) == 0.5
    assert images[1].norm.vmax == images[2].norm.vmax == max(values.max() for values in maps.values())
    assert [label.get_text() for label in panels[1].get_yticklabels()] == names
    assert panels[2].get_xticklabels()[0].get_text() == "t0"
    assert max(figure.get_size_inches()) < 50
    figure.draw_without_rendering()
