"""Used by everything else: checked options, locks, memory handed back, files that are not trusted."""
