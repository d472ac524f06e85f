"""What the user holds: the quantized model, its eager form, its stored form."""
