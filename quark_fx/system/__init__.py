"""What everything else stands on: checked options, locks, memory handed back, files that are not trusted."""
