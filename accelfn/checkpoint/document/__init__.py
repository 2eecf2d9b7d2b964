"""A tree as a document of JSON and named tensors."""
