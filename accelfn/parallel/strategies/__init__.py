"""The strategies by which ranks share a model: one file each, with its plan and what applies it."""
