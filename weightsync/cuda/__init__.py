"""Everything that touches a CUDA driver: handles, pinned memory, events, streams, kernels."""
