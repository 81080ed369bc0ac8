"""Pictures from a model and LoRA files, and the demo. Never part of baking or training."""
