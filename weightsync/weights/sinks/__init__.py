"""Where weights go on the receiver: modules, hooks, and the load targets of one update."""
