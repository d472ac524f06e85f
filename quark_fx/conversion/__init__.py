"""Quantization of a checkpoint file by file, without building the model or running code of the checkpoint."""
