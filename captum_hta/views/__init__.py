"""Images of single results."""
