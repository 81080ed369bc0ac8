"""Pictures from a model and LoRA files. Never part of baking or training."""
