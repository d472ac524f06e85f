"""What reproduces the numbers of other tools: grids that the first batch fixes, and how their bins are read."""
