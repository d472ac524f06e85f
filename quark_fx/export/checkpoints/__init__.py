"""Export of quantized models as Hugging Face and GGUF checkpoints."""
