"""Export of a graph to an ONNX file: translation, conversion to a format, and cleanup."""
