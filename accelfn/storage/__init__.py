"""Where files are: the operations on a disk that saves and loads need."""
