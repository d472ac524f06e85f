"""Number formats, scales and zero points, which scale belongs to which element, and the operators on codes."""
