"""Trees as documents of JSON and named tensors."""
