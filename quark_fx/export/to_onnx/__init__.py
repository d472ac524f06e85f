"""Graph to ONNX file: translation, formats, clean-up."""
