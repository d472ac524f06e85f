"""Graph to Hugging Face and GGUF checkpoints."""
