"""Configurations of users: specs, patterns, and targets."""
