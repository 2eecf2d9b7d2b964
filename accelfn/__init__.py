"""Distributed PyTorch training as plain functions."""
