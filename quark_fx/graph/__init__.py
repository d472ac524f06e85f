"""The captured graph: questions and edits, the operator table, signatures, passes and their contracts."""
