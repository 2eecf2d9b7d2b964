"""Which tensor goes where: sizes, budgets, ties, and the plan. Pure."""

__all__: tuple[str, ...] = ()
