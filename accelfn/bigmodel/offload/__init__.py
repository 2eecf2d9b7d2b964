"""Run a model whose weights lie elsewhere: blocks, links, and the stream of them."""

__all__: tuple[str, ...] = ()
