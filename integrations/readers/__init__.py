"""Readers turn texts, images and audio into the tokens of a model."""
