"""ONNX graphs with a KV cache."""
