"""Mixed precision: one number format per operator, under a budget."""
