"""Files of weights: write, find, open, map and read them, and load them into a model."""
