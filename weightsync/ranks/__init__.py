"""The ranks of one trainer: their collectives, and what each of them runs."""
