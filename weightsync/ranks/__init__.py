"""The ranks of one trainer: their collectives, the rank group and the worker of each rank."""
