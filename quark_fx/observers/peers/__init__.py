"""Histograms and thresholds that reproduce the numbers of other tools, on grids that the first batch fixes."""
