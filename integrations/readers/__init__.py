"""What makes tokens of texts, images and audio."""
