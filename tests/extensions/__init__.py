"""Solvers, passes and targets of one file each, as users write them."""
