"""Programs written for Hugging Face Accelerate run on accelfn: ``import accelerate`` gives accelfn.

>>> import accelfn.compat
>>> accelfn.compat.is_installed()
False
"""

from accelfn.compat.alias import install as install
from accelfn.compat.alias import is_installed as is_installed
from accelfn.compat.alias import uninstall as uninstall
