"""Lines: the pieces of 64 bytes in which memory is compared, patched and checked."""
