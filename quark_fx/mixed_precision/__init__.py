"""One number format for each operator, under a budget."""
