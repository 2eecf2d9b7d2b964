"""Who a process is and how it was configured."""
