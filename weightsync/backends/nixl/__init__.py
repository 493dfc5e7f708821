"""The `nixl` backend: hosts read each other's memory by NIXL, by RDMA where there is some."""
