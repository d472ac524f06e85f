"""The captured graph: queries and edits, the operator table, signatures, passes, and their contracts."""
