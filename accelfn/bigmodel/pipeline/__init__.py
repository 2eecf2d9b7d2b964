"""Run a model in stages, one on each rank: a plan of where it is cut, and the pipeline that runs it."""

__all__: tuple[str, ...] = ()
