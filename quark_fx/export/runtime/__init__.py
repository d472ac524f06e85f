"""ONNX Runtime sessions, the report on a file, and verification against torch."""
