"""Where a graph can be rescaled without changing its function."""
