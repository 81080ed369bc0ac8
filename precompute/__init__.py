"""Stage 1: images and captions in, a store out."""
