"""Stage 2: a store in, a LoRA out, with only the U-Net in memory."""
