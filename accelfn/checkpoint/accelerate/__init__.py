"""Folders that Hugging Face Accelerate writes and reads."""
