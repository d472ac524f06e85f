"""Rescaling and rotation that do not change the function of a graph: the sites and their analysis."""
