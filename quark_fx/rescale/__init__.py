"""Rescaling and rotation of a graph without a change of its function: the sites and their analysis."""
