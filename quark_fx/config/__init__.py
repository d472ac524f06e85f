"""What the user asks for: specs, patterns, and the configuration that holds them."""
