"""Checkpoints turned into others."""
