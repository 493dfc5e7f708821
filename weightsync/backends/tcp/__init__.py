"""The `tcp` backend: receivers on other hosts, which pass what they receive on to each other."""
