"""The strategies by which ranks share a model, in the order of ``table.py``, and what averages replicas."""
