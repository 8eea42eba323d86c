"""WPO-SGM's strategies, run beside each other."""
