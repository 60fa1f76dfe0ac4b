"""Many jobs on shared devices: coordinator, executors, aggregators, and the engines that run them."""
