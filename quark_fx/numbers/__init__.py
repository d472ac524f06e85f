"""Number formats, scales and zero points, their assignment to elements, and the operators on codes."""
