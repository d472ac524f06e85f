"""The quantized model, its eager form, and its stored form."""
