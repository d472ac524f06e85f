"""Analysis of the error of a configuration: contributions of operators, and remedies."""
