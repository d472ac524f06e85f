"""Where the error of a configuration comes from, and what would make it smaller."""
