"""What pages, figures and console output call attention and the contributions of both sources."""

QUANTITY_NAMES = {
    "attention": "attention",
    "previous_layer": "previous-layer contribution",
    "input": "input contribution",
}
