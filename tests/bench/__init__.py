"""Speed beside the peer and plain torch, as ratios in one run. Nothing here is asserted in a test."""
