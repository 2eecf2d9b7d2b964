from typing import Literal

import numpy as np
from numpy.typing import NDArray

# The one form that the examples use: a pair (images, labels) instead of a Bunch.
def load_digits(
    *, n_class: int = 10, return_X_y: Literal[True]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]: ...
