"""Models of TransformerLens: bridges of version 4, and the hooked classes of versions 2 and 3."""

import importlib

from captum_hta.integrations.availability import has_bridges
from captum_hta.integrations.state import unchanged_state

with unchanged_state():
    importlib.import_module("transformer_lens.hook_points")
    if has_bridges():
        importlib.import_module("transformer_lens.model_bridge.sources")
