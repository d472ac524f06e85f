"""Analysis of the error of a configuration: contributions of operators to the error, and remedies."""
