"""Export of ONNX graphs that generate text with a KV cache."""
