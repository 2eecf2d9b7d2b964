"""The bytes on disk: files of tensors, the manifest, and how a checkpoint appears, is found and goes."""

__all__: tuple[str, ...] = ()  # accelfn.checkpoint has what is public
